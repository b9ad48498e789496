"""Hugging Face ids that are none, and repositories that hold no model of ours: refused before anything large comes."""

import json
from pathlib import Path

import pytest

from hetero_ee import CheckpointError, HeteroError, UsageError
from tests.hub_model import ID, INDEX, SINGLE, files_of, in_shards, resolve
from tests.hub_server import Fault, Hub


def listing(commit: str, size: object) -> bytes:
    """What the Hub would say of a model's files."""
    names = ("config.json", "tokenizer.json", SINGLE)
    return json.dumps({"id": ID, "sha": commit, "siblings": [{"rfilename": n, "size": size} for n in names]}).encode()


def refusal(model: str | Path = ID, **options: object) -> HeteroError:
    with pytest.raises(HeteroError) as caught:
        resolve(model, **options)
    message = str(caught.value)
    assert "\n" not in message and "\x1b" not in message and message.endswith(".") and len(message) < 600
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..a/b",
        "a/..",
        "a/b..c",
        "a/b.",
        "a./b",
        "a/b--c",
        "a/b.git",
        "-a/b",
        "a/",
        "CON",
        "org/nul",
        "aux.txt/x",
        "LPT1/x",
        "a/b\0",
        "a/b\n",
        "a%2eb",
        "a%2fb",
        "a/b@v1",
        "a b",
        "C:model",
        "\\\\server\\share",
        "café/x",
        "文件",
        "https:",
        "a" * 97,
        "a/" + "b" * 97,
        "a" * 4096,
        "a?b",
        "a#b",
        "a/b:",
        "a/b:c:d",
        "a/b:..",
        "a/..:Q4_0",
        "llama3.2:1b",
        "https://huggingface.co/datasets/a/b",
        "https://huggingface.co/a/..",
        "https://example.com/a/b",
        "hf.co//[",
    ],
)
def test_what_is_no_id_is_never_asked_for(
    hub: Hub, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal(name)
    assert type(error) is UsageError and "there is no folder" in str(error)
    assert hub.log == [] and not hub_cache.exists()


@pytest.mark.parametrize(
    "name", ["./a", "../a/b", "~/no/folder", "~nobody/x", "/no/folder", "a/b/c", "models/org/name"]
)
def test_what_can_only_be_a_path_is_no_id(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for model in (name, Path(name)):
        error = refusal(model)
        assert type(error) is UsageError and "there is no folder" in str(error) and "Hugging Face id" in str(error)
    assert type(refusal(Path(ID))) is UsageError  # a Path is never an id
    assert hub.log == []


def test_names_of_other_programs_are_told_from_ids(hub: Hub, tmp_path: Path) -> None:
    assert "ollama's short names are not known; give the id of the model" in str(refusal("llama3.1:8b"))
    assert "not the address of a model or a GGUF file on huggingface.co" in str(refusal("https://ollama.com/a/b"))
    assert "'model.safetensors' in a/b is not a GGUF file" in str(refusal("hf.co/a/b/blob/main/model.safetensors"))
    for model in ("model.GGUF", str(tmp_path / "model.gguf"), tmp_path / "model.gguf"):
        assert f"there is no folder {model}; give one with a Hugging Face checkpoint, a store, a GGUF file" in str(
            refusal(model)
        )
    (file := tmp_path / "model.GGUF").touch()
    for model in (file, str(file)):
        assert f"{file} is empty" in str(refusal(model))
    assert hub.log == []


@pytest.mark.parametrize("model", [5, 1.5, b"gpt2", [ID]])
def test_a_model_is_a_string_or_a_path(hub: Hub, model: object) -> None:
    with pytest.raises(UsageError, match="expected a folder or a Hugging Face id"):
        resolve(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "revision",
    [
        "",
        "..",
        "a/../b",
        "../main",
        "/main",
        "main/",
        "a//b",
        "-x",
        "x.",
        "a\0",
        "a\n",
        "a b",
        "NUL",
        "%2e",
        "x" * 201,
    ],
)
def test_impossible_revisions_are_refused(hub: Hub, tiny: Path, revision: str) -> None:
    hub.publish(ID, tiny)
    assert "expected a branch, a tag or a commit" in str(refusal(revision=revision))
    assert hub.log == []


WITHOUT_WEIGHTS = {
    "pickles": ({"pytorch_model.bin": b"\x80"}, "only as pickles"),
    "older pickles": ({"model.pth": b"\x80", "model.pt": b"\x80"}, "only as pickles"),
    "GGUF": ({"mmproj-F16.gguf": b"GGUF"}, "only GGUF files that are not whole models"),
    "an adapter": ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"0"}, "an adapter and no model"),
    "another layout": ({"consolidated.safetensors": b"0"}, f"neither {SINGLE} nor {INDEX}"),
    "parts elsewhere": ({"unet/model.safetensors": b"0"}, "no weights in safetensors"),
    "nothing": ({}, "no weights in safetensors"),
}


@pytest.mark.parametrize(("others", "sentence"), WITHOUT_WEIGHTS.values(), ids=WITHOUT_WEIGHTS)
def test_a_repository_without_weights_to_read(hub: Hub, tiny: Path, others: dict[str, bytes], sentence: str) -> None:
    files = files_of(tiny)
    del files[SINGLE]
    hub.publish(ID, files | others)
    error = refusal()
    assert isinstance(error, CheckpointError) and f"{ID} holds " in str(error) and sentence in str(error)
    assert hub.fetched() == set()


@pytest.mark.parametrize(("name", "sentence"), [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer")])
def test_a_repository_without_a_small_file_it_needs(hub: Hub, tiny: Path, name: str, sentence: str) -> None:
    files = files_of(tiny)
    del files[name]
    hub.publish(ID, files)
    assert f"{ID} has {sentence}" in str(refusal())
    assert hub.fetched() == set()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (b'{"architectures": ["BertModel"], "model_type": "bert"}', "'BertModel' is not supported"),
        (b"{}", "is not supported"),
        (b"[]", "expected a JSON object"),
        (b"{", "not valid JSON"),
    ],
)
def test_the_configuration_is_judged_before_the_weights_come(
    hub: Hub, tiny: Path, config: bytes, sentence: str
) -> None:
    hub.publish(ID, files_of(tiny) | {"config.json": config})
    message = str(refusal())
    assert message.startswith(f"{ID} cannot be used: ") and sentence in message
    assert hub.fetched() == {"config.json"}


@pytest.mark.parametrize(("name", "size_bytes"), [("config.json", 11 * 2**20), ("tokenizer.json", 101 * 2**20)])
def test_an_enormous_small_file_is_not_fetched(hub: Hub, tiny: Path, name: str, size_bytes: int) -> None:
    hub.publish(ID, files_of(tiny) | {name: bytes(size_bytes)})
    assert f"{ID}: {name} has {size_bytes} bytes; it has at most" in str(refusal())
    assert hub.fetched() == set()


def test_an_index_that_names_a_file_which_is_not_there(hub: Hub, tiny: Path) -> None:
    files = in_shards(files_of(tiny))
    del files["model-00002-of-00003.safetensors"]
    hub.publish(ID, files)
    assert f"{ID}: {INDEX} names 'model-00002-of-00003.safetensors', which is missing" in str(refusal())
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"weight_map": {}}', b"[" * 10**5, b"\xff"])
def test_a_malformed_index(hub: Hub, tiny: Path, index: bytes) -> None:
    hub.publish(ID, in_shards(files_of(tiny)) | {INDEX: index})
    assert isinstance(refusal(), CheckpointError)
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"id": "x"}',
        listing("../../x", size=2),
        listing("main", size=2),
        b'{"id": "x", "sha": 5, "siblings": [{}]}',
        listing("0" * 40, size="big"),
        listing("0" * 40, size=None),
        b"<html>Log in to the hotel's network</html>",
    ],
)
def test_an_answer_that_is_no_hubs(hub: Hub, hub_cache: Path, answer: bytes) -> None:

    hub.faults.append(Fault("/api/", status=200, body=answer))
    refusal()
    assert len(hub.log) == 1 and not hub_cache.exists()
