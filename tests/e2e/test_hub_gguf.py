"""GGUF models of the Hub, named by repository and quantization: which files are chosen, downloaded and run."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from hetero_ee import Engine, ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.published import PublishedGguf, choose
from hetero_ee.hub.model_id import ModelId
from tests.command_line import Cli
from tests.families import random_model
from tests.gguf_models import write_gguf
from tests.hub_model import Calls, files_of, resolve
from tests.hub_server import Fault, Hub, digest

ID = "some-org/Tiny-GGUF"
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
OTHERS = {"README.md": b"useless", "mmproj-F16.gguf": b"useless", "imatrix_unsloth.gguf": b"useless"}


@pytest.fixture(scope="session")
def files(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model as GGUF files of three quantizations, the last one in two parts, in a folder of their own."""
    folder, sizes = tmp_path_factory.mktemp("published"), SIZES | {"vocab_size": read_spec(demo).vocab_size}
    model = random_model("llama", **sizes)
    for kind, part_tensors in (("Q8_0", 0), ("Q4_0", 0), ("BF16", len(model.state_dict()) // 2 + 1)):
        file, changes = folder / f"Tiny-{kind}.gguf", {"tokenizer": demo, "part_tensors": part_tensors}
        write_gguf(model, file, lambda _, kind=kind: kind, **changes)
    return {f"BF16/{name}" if "BF16" in name else name: data for name, data in files_of(folder).items()}


def published(*names: str) -> list[str]:
    return [model.quantization for model in PublishedGguf.listed(names)]


def chosen(wanted: str | None, *names: str) -> str:
    return choose(PublishedGguf.listed(names), wanted, "org/name").files[0]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-7b-instruct-q4_k_m.gguf", "q4_k_m"),
        ("model.i1-IQ2_XXS.gguf", "IQ2_XXS"),
        ("UD-Q4_K_XL/M-UD-Q4_K_XL-00001-of-00001.gguf", "UD-Q4_K_XL"),
        ("phi-4-q4.gguf", "q4"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
        ("SmolLM2.Q4_1.gguf", "Q4_1"),
        ("gemma-f16.gguf", "f16"),
        ("ggml-model.gguf", "ggml-model"),
    ],
)
def test_the_quantization_is_that_of_the_file_name(name: str, quantization: str) -> None:
    assert published(name) == [quantization]


def test_only_whole_models_are_listed() -> None:
    parts = [f"m-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    (model,) = PublishedGguf.listed(
        [*reversed(parts), *OTHERS, "M-mmproj-Q8_0.gguf", "../m-Q4_0.gguf", "model.safetensors"]
    )
    assert model.files == tuple(parts)
    assert published(*parts[:2], "m-Q8_0-00004-of-00003.gguf", "m-Q8_0-00001-of-99999.gguf") == []


def test_the_default_is_q4_k_m_else_the_first() -> None:
    names = ("m-BF16.gguf", "m-Q8_0.gguf", "m-q4_k_m.gguf")
    assert chosen(None, *names) == "m-q4_k_m.gguf" and chosen(None, *names[:2]) == "m-BF16.gguf"
    assert chosen("q8_0", *names) == chosen("m-Q8_0.gguf", *names) == "m-Q8_0.gguf"
    assert chosen("Q4_K_XL", "m-UD-Q4_K_XL.gguf") == "m-UD-Q4_K_XL.gguf"
    assert chosen("Q2_K", "m-UD-Q2_K.gguf", "m-Q2_K.gguf") == "m-Q2_K.gguf"
    with pytest.raises(ModelError, match="org/name has no GGUF model 'Q5_K'; it has BF16, Q8_0, q4_k_m; give"):
        chosen("Q5_K", *names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ID, ModelId(ID)),
        (f"{ID}:Q4_K_M", ModelId(ID, gguf="Q4_K_M")),
        (f"hf.co/{ID}:q8_0", ModelId(ID, gguf="q8_0")),
        (f"huggingface.co/{ID}/", ModelId(ID)),
        (f"https://huggingface.co/{ID}?library=gguf", ModelId(ID)),
        (f"https://huggingface.co/{ID}/tree/v1", ModelId(ID, "v1")),
        (f"https://www.huggingface.co/{ID}/tree/refs%2Fpr%2F1", ModelId(ID, "refs/pr/1")),
        (f"https://huggingface.co/{ID}/blob/main/BF16/m-BF16.gguf", ModelId(ID, gguf="BF16/m-BF16.gguf")),
        (f"https://hf.co/{ID}/resolve/main/m.gguf?download=true", ModelId(ID, gguf="m.gguf")),
        ("https://huggingface.co/gpt2/tree/main", ModelId("gpt2")),
    ],
)
def test_names_and_addresses(text: str, expected: ModelId) -> None:
    assert ModelId.of(text) == expected


def test_a_revision_that_is_given_precedes_the_address() -> None:
    assert ModelId.of(f"hf.co/{ID}/tree/v1", "v2").revision == "v2"


@pytest.mark.usefixtures("empty_cache")
def test_only_the_chosen_file_is_downloaded_once(hub: Hub, files: dict[str, bytes], hub_cache: Path) -> None:
    hub.publish(ID, files | OTHERS)
    folder = resolve(f"{ID}:q8_0")
    assert hub.fetched() == {"Tiny-Q8_0.gguf"} and folder.name == "Tiny-Q8_0"
    assert resolve(f"https://huggingface.co/{ID}/blob/main/Tiny-Q8_0.gguf") == folder and hub.fetched() == set()
    assert resolve(f"{ID}:Q8_0", offline=True) == folder and hub.log == []
    with pytest.raises(ModelError, match=rf"{ID}:Q4_0 \(main\) is not in the cache {hub_cache}"):
        resolve(f"{ID}:Q4_0", offline=True)


@pytest.mark.usefixtures("empty_cache")
def test_the_choice_by_default_is_said(hub: Hub, files: dict[str, bytes]) -> None:
    hub.publish(ID, OTHERS | files)
    progress = Calls()
    resolve(ID, progress=progress)
    first, second, *_ = PublishedGguf.listed(files)
    said = next(stage for stage, _, n_all in progress.calls if n_all == 0)
    assert said.startswith(f"{ID}: using {first.files[0]}; for {second.quantization}, ")
    assert hub.fetched() == set(first.files)


@pytest.mark.usefixtures("empty_cache")
def test_all_parts_are_downloaded(hub: Hub, files: dict[str, bytes]) -> None:
    hub.publish(ID, files)
    parts = {name for name in files if name.startswith("BF16/")}
    assert len(parts) == 2
    folder = resolve(f"{ID}:bf16")
    assert {Path(name).name for name in hub.fetched()} == {Path(name).name for name in parts}
    assert resolve(f"{ID}:BF16", offline=True) == folder and hub.log == []


def test_with_safetensors_only_a_quantization_names_gguf(
    hub: Hub, files: dict[str, bytes], tiny: Path, empty_cache: Path
) -> None:
    hub.publish(ID, files | files_of(tiny))
    assert (resolve(ID) / "model.safetensors").is_file()
    assert not any(name.endswith(".gguf") for name in hub.fetched())
    assert resolve(f"{ID}:Q4_0").is_relative_to(empty_cache)
    hub.publish("org/plain", files_of(tiny))
    with pytest.raises(ModelError, match="org/plain has no GGUF model, so there is no 'Q4_0'; give org/plain"):
        resolve("org/plain:Q4_0")


@pytest.mark.usefixtures("empty_cache")
def test_a_damaged_file_is_not_kept(hub: Hub, files: dict[str, bytes]) -> None:
    hub.publish(ID, files)
    hub.faults.append(Fault("/large/", corrupt=True))
    with pytest.raises(ModelError, match=r"Tiny-Q4_0\.gguf arrived damaged"):
        resolve(f"{ID}:Q4_0")
    hub.faults.clear()
    resolve(f"{ID}:Q4_0")


@pytest.mark.parametrize("name", ["Tiny-Q8_0.gguf", "BF16"])
def test_a_plan_downloads_the_headers(
    hub: Hub, files: dict[str, bytes], empty_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("hetero_ee.hub.remote_header.FIRST_BYTES", 2**12)
    hub.publish(ID, files | OTHERS)
    model = f"{ID}:{name.removeprefix('Tiny-').removesuffix('.gguf')}"
    folder = resolve(model, configuration_only=True)
    assert read_spec(folder).n_layers == 1 and folder.is_relative_to(empty_cache)
    size_bytes = sum(len(data) for file, data in files.items() if file.startswith(name))
    sent = [request.n_sent_bytes for request in hub.log if request.path.startswith("/large/")]
    assert len(sent) > 3 and sum(sent) < 0.8 * size_bytes
    hub.log.clear()
    assert resolve(model, configuration_only=True) == folder and hub.fetched() == set()
    whole = resolve(model)
    assert read_spec(whole) == read_spec(folder)
    assert resolve(model, configuration_only=True) == whole == resolve(model, configuration_only=True, offline=True)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"llama", b"lemma", "architecture 'lemma' is not supported"),
        (b"gpt-2", b"gpt-7", "splits text by 'gpt-7'"),
        (b"GGUF", b"GGML", "it does not begin with GGUF"),
        (b"token_embd", b"token_lost", "tensor token_embd.weight is missing"),
    ],
)
def test_what_is_not_supported_is_refused_before_it_is_downloaded(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes, problem: str
) -> None:
    monkeypatch.setattr("hetero_ee.hub.remote_header.FIRST_BYTES", 2**16)
    monkeypatch.setattr("hetero_ee.hub.remote_header.MAX_BYTES", 2**16)
    hub.publish(ID, {"Tiny-Q8_0.gguf": files["Tiny-Q8_0.gguf"].replace(old, new)})
    with pytest.raises(ModelError) as caught:
        resolve(ID)
    assert str(caught.value).startswith(f"{ID} cannot be used: Tiny-Q8_0.gguf") and problem in str(caught.value)
    assert set(hub.ranges()) == {"bytes=0-65535"}


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("server", ["resumes", "sends all", "had other bytes"])
def test_an_interrupted_download_resumes(
    hub: Hub, files: dict[str, bytes], hub_cache: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**10)
    hub.publish(ID, files)
    size_bytes = len(files["Tiny-Q8_0.gguf"])
    configuration = resolve(f"{ID}:Q8_0", configuration_only=True)
    hub.faults.append(Fault("/large/", pause_s=0.02))

    def interrupt(stage: str, n_done: int, n_all: int) -> None:
        if n_done > size_bytes // 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(f"{ID}:Q8_0", progress=interrupt)
    hub.faults.clear()
    (partial,) = hub_cache.glob("*/blobs/*.resumable")
    n_kept_bytes = partial.stat().st_size
    assert 0 < n_kept_bytes < size_bytes
    if server == "sends all":
        hub.ignores_ranges = True
    if server == "had other bytes":
        partial.write_bytes(bytes(n_kept_bytes))
    hub.log.clear()
    progress = Calls()
    assert read_spec(resolve(f"{ID}:Q8_0", progress=progress)) == read_spec(configuration)
    assert hub.ranges()[0] == f"bytes={n_kept_bytes}-"
    assert progress.calls[-1][1:] == (size_bytes, size_bytes)
    (blob,) = (file for file in hub_cache.glob("*/blobs/*") if file.is_file())
    assert blob.read_bytes() == files["Tiny-Q8_0.gguf"]


@pytest.mark.usefixtures("empty_cache")
def test_a_server_without_ranges_sends_a_header_of_several_requests(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_ee.hub.remote_header.FIRST_BYTES", 2**12)
    hub.publish(ID, files)
    hub.ignores_ranges = True
    assert read_spec(resolve(f"{ID}:Q8_0", configuration_only=True)).n_layers == 1
    encodings = [request.encoding for request in hub.log if request.path.startswith("/large/")]
    assert len(encodings) > 1 and set(encodings) == {"identity"}


@pytest.mark.usefixtures("empty_cache")
def test_two_starts_at_once_download_a_file_once(hub: Hub, files: dict[str, bytes], hub_cache: Path) -> None:
    hub.publish(ID, files)
    resolve(f"{ID}:Q8_0", configuration_only=True)
    hub.log.clear()
    hub.faults.append(Fault("/large/", pause_s=0.01))
    progress = [Calls(), Calls()]
    with ThreadPoolExecutor(2) as both:
        started = [both.submit(resolve, f"{ID}:Q8_0", progress=each) for each in progress]
        first, second = (each.result(timeout=60) for each in started)
    assert first == second and len(hub.ranges()) == 1
    size_bytes = len(files["Tiny-Q8_0.gguf"])
    ends = {each.calls[-1][1:] for each in progress if each.calls}  # a late start finds the file and reports nothing
    assert ends == {(size_bytes, size_bytes)}
    assert len([file for file in hub_cache.glob("*/blobs/*") if file.is_file()]) == 1


@pytest.mark.usefixtures("empty_cache")
def test_an_interrupt_ends_the_wait_for_another_download(hub: Hub, files: dict[str, bytes], hub_cache: Path) -> None:
    hub.publish(ID, files)
    resolve(f"{ID}:Q8_0", configuration_only=True)
    hub.log.clear()
    blobs = hub_cache / f"models--{ID.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    calls = Calls()

    def interrupt(*call: Any) -> None:
        calls(*call)
        if len(calls.calls) == 3:
            raise KeyboardInterrupt

    with (
        FileLock(blobs / f"{digest('m.gguf', files['Tiny-Q8_0.gguf'])}.resumable.lock"),
        pytest.raises(KeyboardInterrupt),
    ):
        resolve(f"{ID}:Q8_0", progress=interrupt)
    assert not hub.ranges() and not any("_work" in thread.name for thread in threading.enumerate())


def test_commands_and_python_run_it(hub: Hub, files: dict[str, bytes], cli: Cli, cache: Path) -> None:
    hub.publish(ID, files)
    prompt = ("Once upon a time", "-n", "8", "-t", "1")
    said = cli("run", "-hf", f"{ID}:q4_0", *prompt)
    assert said.code == 0 and said.out
    assert cli("generate", *prompt, "-m", f"hf.co/{ID}:Q4_0", "--offline").out == said.out
    with Engine.from_pretrained(f"{ID}:Q4_0", threads=1) as engine:
        assert engine.generate("Once upon a time", max_new_tokens=8).text == said.out.rstrip("\n")
    assert cli("pull", f"{ID}:Q4_0").out.strip().startswith(str(cache / "stores" / "Tiny-Q4_0-gguf-"))
