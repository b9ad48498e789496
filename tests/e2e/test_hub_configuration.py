"""Planning for a Hugging Face id: the configuration is all that is downloaded."""

from pathlib import Path
from typing import Any

import pytest

from hetero_ee import CheckpointError, ModelError, UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.model_files import QUANTIZE_FILE
from tests.command_line import Cli
from tests.hub_model import ID, SINGLE, Calls, files_of, resolve
from tests.hub_server import Fault, Hub

CONFIG = "config.json"


def configured(model: str | Path = ID, **options: Any) -> Path:
    """Where the model's configuration lies."""
    return resolve(model, configuration_only=True, **options)


def changed(files: dict[str, bytes]) -> dict[str, bytes]:
    return files | {CONFIG: files[CONFIG].rstrip() + b"\n\n"}


def test_the_configuration_alone_is_downloaded_once(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    commit = hub.publish(ID, tiny)
    folder = configured()
    assert folder == hub_cache / "models--some-org--Tiny-0.1B" / "snapshots" / commit
    assert hub.fetched() == {CONFIG} and files_of(folder) == {CONFIG: (tiny / CONFIG).read_bytes()}
    assert configured() == folder and hub.fetched() == set()
    assert configured(offline=True) == folder and hub.log == []


def test_it_is_no_model_that_could_be_run(hub: Hub, tiny: Path) -> None:
    hub.publish(ID, tiny)
    configured()
    with pytest.raises(ModelError, match="or only in part"):
        resolve(offline=True)
    assert files_of(resolve()) == files_of(tiny)


def test_a_whole_model_in_the_cache_stays_what_offline_runs_use(hub: Hub, tiny: Path) -> None:
    files = files_of(tiny)
    hub.publish(ID, files)
    whole = resolve()
    hub.publish(ID, changed(files))
    assert configured() != whole
    assert resolve(offline=True) == whole == configured(offline=True)


def test_without_a_whole_model_the_newest_configuration_is_what_offline_plans_use(hub: Hub, tiny: Path) -> None:
    files = files_of(tiny)
    hub.publish(ID, files)
    configured()
    hub.publish(ID, changed(files))
    newest = configured()
    assert (newest / CONFIG).read_bytes() == changed(files)[CONFIG] and configured(offline=True) == newest


def test_offline_asks_nobody(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    hub.publish(ID, tiny)
    with pytest.raises(ModelError, match=rf"{ID} \(main\) is not in the cache {hub_cache}, .*--offline"):
        configured(offline=True)
    assert hub.log == []


def test_revisions(hub: Hub, tiny: Path) -> None:
    files = files_of(tiny)
    first = hub.publish(ID, files)
    hub.publish(ID, changed(files), "v2")
    assert (configured(revision="v2") / CONFIG).read_bytes() == changed(files)[CONFIG]
    assert configured(revision=first).name == first
    hub.log.clear()
    assert configured(revision=first).name == first and hub.log == []  # a commit never changes
    with pytest.raises(ModelError, match=f"{ID} has no revision v3"):
        configured(revision="v3")


def test_a_folder_is_taken_as_it_is(hub: Hub, tiny: Path) -> None:
    assert configured(tiny) == tiny and hub.log == []
    with pytest.raises(UsageError, match="is a folder"):
        configured(tiny, revision="main")


def test_without_an_answer_the_cache_has_to_do(hub: Hub, tiny: Path) -> None:
    hub.publish(ID, tiny)
    folder = configured()
    hub.faults.append(Fault("/api/", status=503))
    progress = Calls()
    assert configured(progress=progress) == folder
    assert "cannot be reached; using" in progress.calls[0][0]
    with pytest.raises(ModelError, match="503"):
        configured("org/other")


@pytest.mark.parametrize("damage", [b"", b"{", b'{"model_type": "llama"}'])
def test_a_damaged_configuration_in_the_cache_is_fetched_anew(hub: Hub, tiny: Path, damage: bytes) -> None:
    hub.publish(ID, tiny)
    (configured() / CONFIG).resolve().write_bytes(damage)
    with pytest.raises(ModelError, match="is not in the cache"):
        configured(offline=True)
    assert (configured() / CONFIG).read_bytes() == (tiny / CONFIG).read_bytes()


def test_what_cannot_be_run_is_not_planned_for_either(hub: Hub, tiny: Path) -> None:
    files = files_of(tiny)
    hub.publish("org/gguf", {"imatrix.gguf": b"x"})
    hub.publish("org/no-config", {SINGLE: files[SINGLE]})
    hub.publish("org/unknown", files | {CONFIG: b'{"model_type": "mamba"}'})
    with pytest.raises(CheckpointError, match="only GGUF files"):
        configured("org/gguf")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        configured("org/no-config")
    with pytest.raises(ModelError, match="org/unknown cannot be used"):
        configured("org/unknown")


def test_a_configuration_that_arrives_damaged_is_not_kept(hub: Hub, tiny: Path) -> None:
    hub.publish(ID, tiny)
    hub.faults.append(Fault(CONFIG, corrupt=True))
    with pytest.raises(CheckpointError, match="arrived damaged"):
        configured()
    hub.faults.clear()
    assert (configured() / CONFIG).read_bytes() == (tiny / CONFIG).read_bytes()


def test_the_command_that_plans_downloads_no_weights(cli: Cli, hub: Hub, tiny: Path) -> None:
    hub.publish(ID, tiny)
    ended = cli("plan", ID, "--hardware", "rtx-3060-12gb", "--json")
    assert ended.code == 0 and '"model": "LlamaForCausalLM"' in ended.out
    assert hub.fetched() == {CONFIG}
    assert cli("plan", ID, "--hardware", "rtx-3060-12gb", "--json", "--offline").out == ended.out and hub.log == []


def test_what_old_gptq_says_in_a_file_beside_is_downloaded_too(hub: Hub, tiny: Path) -> None:
    said = {QUANTIZE_FILE: b'{"bits": 4, "group_size": 128, "sym": false}'}
    hub.publish(ID, files_of(tiny) | said)
    assert read_spec(configured()).matrix_layouts and hub.fetched() == {CONFIG, QUANTIZE_FILE}
    hub.publish("org/three", files_of(tiny) | {QUANTIZE_FILE: b'{"bits": 3}'})
    with pytest.raises(ModelError, match=r"org/three cannot be used: .*GPTQ in 3 bits is not supported"):
        configured("org/three")
