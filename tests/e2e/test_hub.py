"""Hugging Face ids: what is downloaded, when, and where it then lies."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, ModelError, UsageError
from hetero_ee.hub.model_id import model_name
from tests import hub_server
from tests.command_line import N_TOKENS, PROMPT
from tests.hub_model import ID, INDEX, SINGLE, Calls, files_of, in_shards, resolve
from tests.hub_server import Fault, Hub

USELESS = (
    "README.md",
    ".gitattributes",
    "pytorch_model.bin",
    "tf_model.h5",
    "model.fp16.safetensors",
    "consolidated.safetensors",
    "model-Q4_K_M.gguf",
    "modeling_own.py",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "onnx/config.json",
    "training_args.bin",
)


def test_first_use_downloads_what_is_needed_and_second_use_nothing(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    commit = hub.publish(ID, files_of(tiny) | dict.fromkeys(USELESS, b"useless"))
    folder = resolve()
    assert folder == hub_cache / "models--some-org--Tiny-0.1B" / "snapshots" / commit
    assert hub.fetched() == files_of(tiny).keys()
    assert files_of(folder) == files_of(tiny)
    assert resolve() == folder
    assert [request.path for request in hub.log] == [f"/api/models/{ID}/revision/main"]


def test_weights_in_several_files_are_those_of_the_index(hub: Hub, tiny: Path) -> None:
    files = in_shards(files_of(tiny))
    hub.publish(ID, files | dict.fromkeys(USELESS, b"useless") | {"model-00004-of-00003.safetensors": b"useless"})
    folder = resolve()
    assert hub.fetched() == files.keys()
    assert files_of(folder) == files


def test_of_a_single_file_and_an_index_the_single_file_is_downloaded(hub: Hub, tiny: Path) -> None:
    hub.publish(ID, files_of(tiny) | in_shards(files_of(tiny)))
    resolve()
    assert hub.fetched() == files_of(tiny).keys()


@pytest.mark.parametrize("shards", [False, True])
def test_what_a_downloaded_model_says(hub: Hub, tiny: Path, cache: Path, said: str, shards: bool) -> None:
    hub.publish(ID, in_shards(files_of(tiny)) if shards else files_of(tiny))
    for offline in (False, True):
        with Engine.from_pretrained(ID, quantizer="none", threads=1, offline=offline) as engine:
            assert engine.generate(PROMPT, max_new_tokens=N_TOKENS).text == said


def test_a_legacy_id_has_one_name(hub: Hub, tiny: Path) -> None:
    hub.publish("gpt2", tiny)
    assert files_of(resolve("gpt2")) == files_of(tiny)


def test_revisions(hub: Hub, tiny: Path) -> None:
    files = files_of(tiny)
    first = hub.publish(ID, files)
    second = hub.publish(ID, files | {"generation_config.json": b'{"top_k": 3}'})
    hub.publish(ID, files | {"generation_config.json": b'{"top_k": 4}'}, "refs/pr/1")
    contents = {
        revision: (resolve(revision=revision) / "generation_config.json").read_bytes()
        for revision in ("main", "refs/pr/1", second)
    }
    assert contents == {"main": b'{"top_k": 3}', "refs/pr/1": b'{"top_k": 4}', second: b'{"top_k": 3}'}
    assert resolve(revision=first).name == first
    for revision in ("main", "refs/pr/1", first):  # each is known by its name without the Hub too
        online = resolve(revision=revision)
        assert resolve(revision=revision, offline=True) == online
    with pytest.raises(ModelError, match=f"{ID} has no revision v2; .*/{ID} lists"):
        resolve(revision="v2")


def test_a_new_commit_shares_the_files_that_did_not_change(hub: Hub, tiny: Path) -> None:
    files = files_of(tiny)
    before = resolve() if hub.publish(ID, files) else None
    hub.log.clear()
    hub.publish(ID, files | {"generation_config.json": b"{}"})
    progress = Calls()
    after = resolve(progress=progress)
    assert hub.fetched() == {"generation_config.json"}
    assert after != before and files_of(after) == files | {"generation_config.json": b"{}"}
    assert resolve(offline=True) == after
    assert {n_all for _, _, n_all in progress.calls} == {2}  # the weights were there


def test_a_commit_in_the_cache_needs_no_question(hub: Hub, tiny: Path) -> None:
    commit = hub.publish(ID, tiny)
    folder = resolve(revision=commit)
    hub.log.clear()
    assert resolve(revision=commit) == folder
    assert hub.log == []


def test_a_commit_in_the_cache_without_a_tokenizer_is_completed(hub: Hub, tiny: Path) -> None:
    """As other programs leave it, which need no tokenizer."""
    commit = hub.publish(ID, tiny)
    folder = resolve(revision=commit)
    (folder / "tokenizer.json").unlink()
    assert resolve(revision=commit) == folder
    assert files_of(folder) == files_of(tiny)


def test_files_without_a_checksum_are_named(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = hub_server._listed

    def without(name: str, content: bytes) -> dict[str, Any]:
        return {key: value for key, value in listed(name, content).items() if key in ("rfilename", "size")}

    monkeypatch.setattr(hub_server, "_listed", without)
    hub.publish(ID, files_of(tiny))
    progress = Calls()
    resolve(progress=progress)
    (said,) = {stage for stage, _, n_all in progress.calls if n_all == 0}
    n_files = len(files_of(tiny))
    assert said == f"{ID}: {n_files} files, {SINGLE} among them, came without a checksum; only sizes were checked"


def test_progress_counts_the_bytes(hub: Hub, tiny: Path) -> None:
    hub.publish(ID, tiny)
    hub.faults.append(Fault("/large/", pause_s=0.003))
    progress = Calls()
    resolve(progress=progress)
    size_bytes = sum(file.stat().st_size for file in tiny.iterdir() if file.name != "config.json")
    assert {(stage, n_all) for stage, _, n_all in progress.calls} == {(f"Downloading {ID}", size_bytes)}
    done = [n_done for _, n_done, _ in progress.calls]
    assert done == sorted(done) and done[-1] == size_bytes


def test_a_folder_of_that_name_wins(hub: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(ID).parent.mkdir()
    Path(ID).symlink_to(tiny)
    assert resolve() == Path(ID)
    assert hub.log == []
    with pytest.raises(UsageError, match=r"revision is 'main', but .* is a folder"):
        resolve(revision="main")


def test_offline_asks_nobody(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    hub.publish(ID, tiny)
    with pytest.raises(ModelError, match=rf"{ID} \(main\) is not in the cache {hub_cache}, .*--offline"):
        resolve(offline=True)
    assert hub.log == []
    folder = resolve()
    hub.log.clear()
    assert resolve(offline=True) == folder
    with pytest.raises(ModelError, match=r"\(v1\) is not in the cache"):
        resolve(offline=True, revision="v1")
    assert hub.log == []


def test_offline_needs_all_weights(hub: Hub, tiny: Path) -> None:
    hub.publish(ID, in_shards(files_of(tiny)))
    folder = resolve()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="or only in part"):
        resolve(offline=True)
    assert "model-00002-of-00003.safetensors" in files_of(resolve())


@pytest.mark.parametrize(
    "fault",
    [
        Fault("/api/", status=503),
        Fault("/api/", status=429),
        Fault("/api/", status=401, headers={"X-Error-Code": "RepoNotFound"}),
        Fault("/api/", status=403),
        Fault("/api/", status=200, body=b"<html>Log in to the hotel's network</html>"),
    ],
    ids=["503", "429", "401", "403", "a portal's page"],
)
def test_without_an_answer_the_cache_has_to_do(hub: Hub, tiny: Path, fault: Fault) -> None:
    hub.publish(ID, tiny)
    folder = resolve()
    hub.log.clear()
    hub.faults.append(fault)
    progress = Calls()
    assert resolve(progress=progress) == folder
    host = hub.address.removeprefix("http://")
    assert progress.calls == [(f"{host} cannot be reached; using {ID} from the cache", 0, 0)]
    assert len(hub.log) == 1
    with pytest.raises(ModelError):
        resolve(revision="v1")


def test_a_damaged_file_in_the_cache_is_fetched_anew(hub: Hub, tiny: Path) -> None:
    hub.publish(ID, tiny)
    folder = resolve()
    hub.log.clear()
    for name in (SINGLE, "tokenizer.json"):
        file = (folder / name).resolve()
        file.write_bytes(file.read_bytes()[:-1])
    assert files_of(resolve()) == files_of(tiny)
    assert hub.fetched() == {SINGLE, "tokenizer.json"}


def test_a_damaged_index_in_the_cache_is_fetched_anew(hub: Hub, tiny: Path) -> None:
    files = in_shards(files_of(tiny))
    hub.publish(ID, files)
    (resolve() / INDEX).resolve().write_bytes(b"{")
    with pytest.raises(ModelError, match="or only in part"):
        resolve(offline=True)
    assert files_of(resolve()) == files


def test_names_of_models(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    hub.publish(ID, tiny)
    assert model_name(resolve()) == "some-org/Tiny-0.1B"
    assert model_name(tiny) == "tiny"
    linked = tmp_path / "link"
    linked.symlink_to(resolve())
    assert model_name(linked) == "some-org/Tiny-0.1B"
    assert model_name(tmp_path / "snapshots" / "x") == "x"


def test_an_int4_store_is_made_of_it_once(hub: Hub, tiny: Path, cache: Path) -> None:
    hub.publish(ID, tiny)
    texts = set()
    for offline in (False, True):
        with Engine.from_pretrained(ID, quantizer="rtn", threads=1, offline=offline) as engine:
            texts.add(engine.generate(PROMPT, max_new_tokens=N_TOKENS).text)
    assert len(texts) == 1
    assert len(list(cache.glob("stores/*/manifest.json"))) == 1


def test_the_index_is_not_followed_out_of_the_repository(hub: Hub, tiny: Path) -> None:
    files = in_shards(files_of(tiny))
    file_of = json.loads(files[INDEX])["weight_map"]
    for name in ("../../../etc/passwd.safetensors", "/etc/passwd.safetensors", "..safetensors", "model.bin", 5):
        changed = {INDEX: json.dumps({"weight_map": file_of | {"lm_head.weight": name}}).encode()}
        hub.publish(f"org/{hashlib.sha256(changed[INDEX]).hexdigest()[:9]}", files | changed)
    for model in list(hub.revisions):
        with pytest.raises(ModelError, match=r"expected a \.safetensors file"):
            resolve(model)
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
