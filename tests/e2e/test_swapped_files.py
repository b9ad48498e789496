"""A pipe that takes a file's place after it was looked at: refused in time, where opening it would wait for ever."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.config.settings import read_settings
from hetero_ee.errors import CheckpointError, HeteroError, ModelError, StoreError, UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.planning.hardware import hardware_from
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.store.reader import open_store
from tests.store_support import made_store, one_layer_model

TIMEOUT_S = 20
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")


def swap(file: Path, patch: pytest.MonkeyPatch) -> None:
    """Puts a pipe in the file's place; whoever looks at the path is told of the file that was there."""
    looked_at = file.stat()
    file.unlink()
    os.mkfifo(file)
    for name in ("stat", "lstat"):
        real = getattr(os, name)

        def look(path: Any, *arguments: Any, _real: Any = real, **options: Any) -> os.stat_result:
            return looked_at if path == file else _real(path, *arguments, **options)

        patch.setattr(os, name, look)


def refusal(call: Callable[[], object]) -> HeteroError:
    """What the call is refused with. Fails where it waits."""
    raised = list[BaseException]()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "it waits for a pipe that nobody writes to"
    (error,) = raised
    assert isinstance(error, HeteroError)
    return error


READERS: dict[str, tuple[Callable[[Path], object], type[HeteroError]]] = {
    "config.json": (read_spec, ModelError),
    "model.safetensors": (lambda folder: Checkpoint(folder, read_spec(folder)), CheckpointError),
    "store/manifest.json": (lambda folder: open_store(folder / "store", read_spec(folder)), StoreError),
    "store/weights.bin": (lambda folder: open_store(folder / "store", read_spec(folder)), StoreError),
    "config.toml": (lambda folder: read_settings({"HETERO_EE_CONFIG": str(folder / "config.toml")}), UsageError),
    "profile.json": (lambda folder: hardware_from(folder / "profile.json"), UsageError),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_swapped_in_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_store(one_layer_model(tmp_path), tmp_path / "store")
    (tmp_path / "config.toml").touch()
    (tmp_path / "profile.json").touch()
    read, kind = READERS[name]
    swap(tmp_path / name, monkeypatch)
    error = refusal(lambda: read(tmp_path))
    assert isinstance(error, kind) and "it is a pipe" in str(error) and str(tmp_path / name) in str(error)
