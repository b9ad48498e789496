"""What the tests of stores share: a small model, a disk that fails, and what lies in a folder."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.filesystem import FileSystem
from tests.families import random_model, save_checkpoint

FAST = Quantization(matrices="rtn")


def one_layer_model(folder: Path) -> Path:
    """A checkpoint of one layer, and two of the small files that a store gets a copy of."""
    save_checkpoint(random_model("llama", num_hidden_layers=1), folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def made_store(model_folder: Path, target: Path, **options: Any) -> Path:
    """The model's store, by the fastest quantizer."""
    return convert(model_folder, read_spec(model_folder), target, FAST, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder; an empty folder counts too. Locks do not."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in found}


class FaultyDisk:
    """The real disk, but call number `fail_at` fails, having done half a write.

    lasting: every call from there on fails. late: the call does its work and fails then.
    """

    def __init__(self, fail_at: int, error: BaseException, *, lasting: bool = False, late: bool = False) -> None:
        self.fail_at, self.error, self.lasting, self.late = fail_at, error, lasting, late
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            now = len(self.calls)
            fails = now >= self.fail_at if self.lasting else now == self.fail_at
            real = getattr(FileSystem(), name)
            if not fails:
                return real(*arguments)
            if name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif self.late:
                real(*arguments)
            raise self.error

        return call


def interrupted(model_folder: Path, target: Path, share: float = 0.5) -> bool:
    """Leaves a share of a conversion of the model, as Ctrl-C does; whether there is one."""

    def interrupt(stage: str, n_done: int, n_all: int) -> None:
        if n_done > share * n_all:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        made_store(model_folder, target, progress=interrupt)
    return target.with_name(f"{target.name}.partial").is_dir()
