"""Where the CPU kernels' compiled form is kept."""

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hetero_ee.errors import StoreError

FILLED_FILE = "filled"


def kernel_cache_folder(cache: Path) -> Path:
    """One folder for each state of the kernels' sources, so that an edit can't meet what was compiled before it.

    Numba itself keys what lies in it by its version, CPU name and features, but overlooks edits to imported modules.
    """
    spec = find_spec("hetero_ee_cpu_ops")
    assert spec is not None and spec.origin is not None
    digest = hashlib.sha256()
    for file in sorted(Path(spec.origin).parent.rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return cache / "kernels" / digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A folder of compiled kernels; filled once what a first token needs has been compiled into it."""

    folder: Path

    def is_filled(self) -> bool:
        return (self.folder / FILLED_FILE).exists()

    def set_filled(self) -> None:
        (self.folder / FILLED_FILE).touch()


def use_kernel_cache(cache: Path) -> KernelCache:
    """Makes Numba keep compiled kernels below `cache`; call before the kernels are imported. Raises StoreError."""
    import numba

    folder = kernel_cache_folder(cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the cache folder {cache} can't be used ({error}); set HETERO_EE_CACHE_DIR to a folder that can."
        ) from error
    numba.config.CACHE_DIR = str(folder)
    return KernelCache(folder)
