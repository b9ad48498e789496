"""Choose the implementation that computes an operation on a GPU, and explain the choice.

Kinds of GPU are "cuda", NVIDIA's, and "rocm", AMD's, which torch calls cuda too. Each operation has its implementations
in order of preference; all take the same arguments. Nothing is imported before it is chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hetero_ee.errors import UsageError

Warn = Callable[[str], None]  # reports, once, what an automatic choice had to do without
IsInstalled = Callable[[str], bool]
KINDS = ("cuda", "rocm")
WAYS_OUT = {
    "triton": "`pip install triton`, on Linux",
    "bitsandbytes": "`pip install bitsandbytes`",
    "torch": "`pip install torch`",
}
TILES = "hetero_ee.ops.gpu:tile_matrix"


@dataclass(frozen=True, slots=True)
class Implementation:
    """A function that computes an operation, and what the function needs."""

    operation: str
    name: str  # name, which is also that of the package it needs
    entry: str  # "module:attribute" of the function that computes the operation
    kinds: tuple[str, ...] = KINDS
    prepare: str = TILES  # "module:attribute" of the function that prepares a weight
    is_capturable: bool = False  # its launches may be recorded in a CUDA graph

    def load(self) -> Any:
        return _loaded(self.entry)

    def load_prepare(self) -> Any:
        return _loaded(self.prepare)


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation chosen for a kind of GPU."""

    implementation: Implementation
    kind: str
    missing: tuple[str, ...]  # preferred implementations that are not installed

    @property
    def reason(self) -> str:
        """The reason for the choice, in one sentence for people."""
        chosen = self.implementation
        what = f"{chosen.operation} on {self.kind} is computed by {chosen.name}"
        if not self.missing:
            return f"{what}, the fastest there is."
        ways = " or ".join(WAYS_OUT[name] for name in self.missing)
        return f"{what}, because {' and '.join(self.missing)} can't be imported; {ways} makes it faster."


def is_installed(package: str) -> bool:
    """Return whether the package could be imported, without importing it."""
    return find_spec(package) is not None


class Registry:
    """Chooses an implementation for each operation. Tests replace `is_installed` to simulate missing packages."""

    def __init__(self, is_installed: IsInstalled = is_installed, warn: Warn | None = None) -> None:
        self._is_installed, self._warn = is_installed, warn
        self._told: set[str] = set()

    def explain(self, operation: str, kind: str) -> Choice:
        """Return the choice that choose() would make. Raises: UsageError: if nothing computes the operation."""
        candidates = [one for one in IMPLEMENTATIONS if one.operation == operation and kind in one.kinds]
        if not candidates:
            known = ", ".join(sorted({one.operation for one in IMPLEMENTATIONS if kind in one.kinds})) or "none"
            raise UsageError(f"no operation is called {operation!r:.40} on {kind!r:.20}; there are {known}.")
        missing: list[str] = []
        for candidate in candidates:
            if self._is_installed(candidate.name):
                return Choice(candidate, kind, tuple(missing))
            missing.append(candidate.name)
        ways = " or ".join(WAYS_OUT[name] for name in missing)
        raise UsageError(f"nothing on this machine computes {operation} on {kind}; {ways} does.")

    def choose(self, operation: str, kind: str) -> Implementation:
        """Return the first installed implementation. Warns once if a faster one is missing. Raises: as explain()."""
        choice = self.explain(operation, kind)
        if choice.missing and self._warn and choice.reason not in self._told:
            self._told.add(choice.reason)
            self._warn(choice.reason)
        return choice.implementation


def _loaded(entry: str) -> Any:
    module, attribute = entry.split(":")
    return getattr(import_module(module), attribute)


def _pair(operation: str, entry: str, reference: str = "reference") -> tuple[Implementation, Implementation]:
    """Return the Triton and the torch implementation of an operation. The latter is in the module `reference`."""
    return (
        Implementation(operation, "triton", f"hetero_ee_kernels.{entry}", is_capturable=True),
        Implementation(operation, "torch", f"hetero_ee_kernels.{reference}:{entry.split(':')[1]}"),
    )


_INT4 = _pair("matmul_int4", "matmul:matmul")
_BITSANDBYTES = "hetero_ee.ops.bitsandbytes_matmul"
IMPLEMENTATIONS = (
    _INT4[0],
    Implementation(
        "matmul_int4",
        "bitsandbytes",
        f"{_BITSANDBYTES}:matmul",
        kinds=("cuda",),
        prepare=f"{_BITSANDBYTES}:bitsandbytes_matrix",
    ),
    _INT4[1],
    *_pair("matmul_int8", "matmul:matmul"),
    *_pair("sliced_head", "sliced_head:sliced_head"),
    *_pair("masked_linear", "masked_linear:masked_linear", "rows_reference"),
    *_pair("sparse_ffn", "sparse_ffn:sparse_ffn", "rows_reference"),
    *_pair("first_sections", "sparse_ffn:first_sections", "rows_reference"),
    *_pair("fold_sections", "sparse_ffn:fold_sections", "rows_reference"),
    *_pair("draft", "draft:draft"),
    *_pair("embed", "embed:embed"),
    *_pair("rms_norm", "norm:rms_norm"),
    *_pair("layer_norm", "norm:layer_norm"),
    *_pair("rms_norm_heads", "norm:rms_norm_heads"),
    *_pair("activate", "activate:activate"),
    *_pair("kv_write", "kv_write:kv_write"),
    *_pair("attention", "attention:attention"),
    *_pair("gated_delta", "gated_delta:gated_delta", "delta_reference"),
    *_pair("mamba2", "gated_delta:mamba2", "delta_reference"),
    *_pair("short_conv", "short_conv:short_conv", "delta_reference"),
    *_pair("route", "route:route", "experts_reference"),
    *_pair("fp32_product", "route:fp32_product", "experts_reference"),
    *_pair("expert_matmul", "experts:expert_matmul", "experts_reference"),
    *_pair("add_experts", "experts:add_experts", "experts_reference"),
)
