"""Where the CPU kernels' compiled form is kept."""

import hashlib
from importlib.util import find_spec
from pathlib import Path


def kernel_cache_folder(cache: Path) -> Path:
    """One folder for each state of the kernels' sources, so that an edit can't meet what was compiled before it.

    Numba itself keys what lies in it by its version, CPU name and features, but overlooks edits to imported modules.
    """
    spec = find_spec("hetero_ee_cpu_ops")
    assert spec is not None and spec.origin is not None
    digest = hashlib.sha256()
    for file in sorted(Path(spec.origin).parent.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return cache / "kernels" / digest.hexdigest()[:16]


def use_kernel_cache(cache: Path) -> bool:
    """Makes Numba keep compiled kernels below `cache`; call before the kernels are imported. True at the first use."""
    import numba

    folder = kernel_cache_folder(cache)
    is_first_use = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    numba.config.CACHE_DIR = str(folder)
    return is_first_use
