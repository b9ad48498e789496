"""Checks the software: Python and the packages. A package is imported only if a cheaper check is not enough."""

import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from hetero_ee.errors import UsageError
from hetero_ee.ops.registry import IsInstalled, Registry, is_installed
from hetero_ee_cli.checks.finding import Finding, fail, ok, warn
from hetero_ee_cli.checks.tested_versions import TESTED_VERSIONS
from hetero_ee_profiles.host.host import TIMEOUT_S, Host
from hetero_ee_profiles.host.torch_build import TorchBuild

LOWEST_PYTHON = (3, 11)
INSTALL = "Reinstall hetero-ee: its dependencies are incomplete."
Version = Callable[[str], str | None]


def package_version(package: str) -> str | None:
    """Return the version of an installed package that can be imported, or None."""
    try:
        return version(package) if find_spec(package.replace("-", "_")) else None
    except (PackageNotFoundError, ValueError):
        return None


def hetero_ee_version() -> Finding:
    import hetero_ee

    return ok(hetero_ee.__version__)


def python() -> Finding:
    bits = 64 if sys.maxsize > 2**32 else 32
    text = f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.implementation.name}, {bits}-bit)"
    if sys.version_info < LOWEST_PYTHON or bits == 32:
        return fail(text, "Use a 64-bit Python 3.11 or later.")
    return ok(text)


def torch(build: Callable[[], TorchBuild]) -> Finding:
    """Check torch by importing it in a process of its own."""
    found = build()
    if not found.version:
        return fail(f"can't be imported ({found.problem})", "Run `python -c 'import torch'` to see why.")
    return ok(f"{found.version}, {found.platform}")


def needed(package: str, version_of: Version = package_version) -> Finding:
    found = version_of(package)
    return ok(found) if found else fail("not installed", INSTALL)


def untested_versions(version_of: Version = package_version, tested: Mapping[str, str] = TESTED_VERSIONS) -> Finding:
    """Report dependencies that are newer than every version that the project's tests have run with."""
    newer = [
        f"{package} {found} (tested up to {newest})"
        for package, newest in tested.items()
        if (found := version_of(package)) and _release(found) > _release(newest)
    ]
    if not newer:
        return ok("no dependency is newer than its newest tested version")
    return warn(", ".join(newer), "If something fails, try again with the tested versions.")


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: (2, 13, 0) for "2.13.0+cpu"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def numba(version_of: Version = package_version) -> Finding:
    found, below = version_of("numba"), version_of("llvmlite")
    if not (found and below):
        return fail("not installed" if not found else "llvmlite is not installed", INSTALL)
    return ok(f"{found}, llvmlite {below}; the kernels use their own threads, not Numba's")


def openmp(host: Host) -> Finding:
    """Check the system's OpenMP. Only bitsandbytes needs it: the kernels use none, and torch includes its own."""
    if host.system != "linux":
        return ok("not checked on this system")
    found = host.run(["/sbin/ldconfig", "-p"], TIMEOUT_S)
    if found.problem:
        return ok("unknown (no ldconfig); only bitsandbytes on the CPU needs it")
    names = [name for name in ("libgomp", "libomp", "libiomp5") if f"\t{name}.so" in found.output]
    return ok(", ".join(names) if names else "none; only bitsandbytes on the CPU needs it")


def gpu_matmul(
    kind: Callable[[], str | None], version_of: Version = package_version, is_installed: IsInstalled = is_installed
) -> Finding:
    """Report the implementation of GPU products that the engine uses, and the reason.

    `kind` is the kind of the GPU, as in the registry, or None without a GPU.
    """
    installed = [name for name in ("triton", "bitsandbytes") if is_installed(name)]
    versions = ", ".join(f"{name} {version_of(name) or 'of unknown version'}" for name in installed)
    versions = versions or "neither triton nor bitsandbytes"
    found = kind()
    if found is None and not installed:
        return ok("triton and bitsandbytes are not installed (GPU only)")
    try:
        choice = Registry(is_installed).explain("matmul_int4", found or "cuda")
    except UsageError as error:
        return fail(f"{versions}; {str(error).rstrip('.')}", INSTALL)
    text = f"{versions}; {choice.reason.rstrip('.')}"
    if found is None:
        return ok(f"not used without a GPU: {text}")
    return warn(text, "Install triton; torch builds for GPUs on Linux include it.") if choice.missing else ok(text)
