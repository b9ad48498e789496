"""Which implementation computes an operation on a kind of device, and why.

Kinds of device: "cpu"; "cuda", NVIDIA's; "rocm", AMD's, which torch calls cuda too. Each operation has its
implementations in order of preference; those of one kind of device take the same arguments. Nothing is imported before
it is chosen.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hetero_ee.errors import UsageError

Warn = Callable[[str], None]  # is told, once, what an automatic choice had to do without
IsInstalled = Callable[[str], bool]
GPU_KINDS = ("cuda", "rocm")
WAYS_OUT = {
    "triton": "`pip install triton`, on Linux",
    "bitsandbytes": "`pip install bitsandbytes`",
    "numba": "`pip install numba`",
    "torch": "`pip install torch`",
}


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operation. name: also the package that it needs.

    entry: "module:attribute" of what computes it; prepare: the same of what makes a weight ready for it, where a weight
    is not taken as it is. is_capturable: its launches may be recorded in a CUDA graph.
    """

    operation: str
    kinds: tuple[str, ...]
    name: str
    entry: str
    prepare: str = ""
    is_capturable: bool = False

    def load(self) -> Any:
        return _loaded(self.entry)

    def load_prepare(self) -> Any:
        return _loaded(self.prepare)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is taken on a kind of device; missing: preferred implementations that are not there."""

    implementation: Implementation
    kind: str
    missing: tuple[str, ...]

    @property
    def reason(self) -> str:
        """One sentence for people."""
        chosen = self.implementation
        what = f"{chosen.operation} on {self.kind} is computed by {chosen.name}"
        if not self.missing:
            return f"{what}, the fastest there is."
        ways = " or ".join(WAYS_OUT[name] for name in self.missing)
        return f"{what}, because {' and '.join(self.missing)} can't be imported; {ways} makes it faster."


def is_installed(package: str) -> bool:
    """Whether it could be imported; imports nothing."""
    return find_spec(package) is not None


class Registry:
    """is_installed: a seam, so that a machine without a package can be tried out. warn: see Warn."""

    def __init__(
        self,
        implementations: Iterable[Implementation],
        is_installed: IsInstalled = is_installed,
        warn: Warn | None = None,
    ) -> None:
        self._implementations = tuple(implementations)
        self._is_installed, self._warn = is_installed, warn
        self._told: set[str] = set()

    def operations(self, kind: str) -> list[str]:
        """Names of what can be computed on a kind of device, sorted."""
        return sorted({one.operation for one in self._implementations if kind in one.kinds})

    def explain(self, operation: str, kind: str) -> Choice:
        """What choose() would take without a name. Raises UsageError where there is no such operation."""
        candidates = self._candidates(operation, kind)
        missing: list[str] = []
        for candidate in candidates:
            if self._is_installed(candidate.name):
                return Choice(candidate, kind, tuple(missing))
            missing.append(candidate.name)
        ways = " or ".join(WAYS_OUT[name] for name in missing)
        raise UsageError(f"nothing on this machine computes {operation} on {kind}; {ways} does.")

    def choose(self, operation: str, kind: str, name: str | None = None) -> Implementation:
        """The first implementation that is there, reported once where another is preferred; with a name, that one only.

        Raises UsageError where the named one is unknown or missing, or where there is no such operation.
        """
        if name is not None:
            return self._named(operation, kind, name)
        choice = self.explain(operation, kind)
        if choice.missing and self._warn and choice.reason not in self._told:
            self._told.add(choice.reason)
            self._warn(choice.reason)
        return choice.implementation

    def _named(self, operation: str, kind: str, name: str) -> Implementation:
        candidates = self._candidates(operation, kind)
        for candidate in candidates:
            if candidate.name == name:
                if self._is_installed(name):
                    return candidate
                raise UsageError(
                    f"{name} was asked for {operation} but is not installed; {WAYS_OUT[name]} installs it."
                )
        there = ", ".join(candidate.name for candidate in candidates)
        raise UsageError(f"{operation} on {kind} has no implementation called {name!r:.40}; there are {there}.")

    def _candidates(self, operation: str, kind: str) -> list[Implementation]:
        found = [one for one in self._implementations if one.operation == operation and kind in one.kinds]
        if not found:
            known = ", ".join(self.operations(kind)) or "none"
            raise UsageError(f"no operation is called {operation!r:.40} on {kind!r:.20}; there are {known}.")
        return found


def device_kind(device: Any) -> str:
    """The registry's word for a torch.device."""
    import torch

    if device.type != "cuda":
        return str(device.type)
    return "rocm" if torch.version.hip else "cuda"


def default_registry(is_installed: IsInstalled = is_installed, warn: Warn | None = None) -> Registry:
    """Everything that comes with hetero_ee."""
    return Registry(IMPLEMENTATIONS, is_installed, warn)


def _loaded(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


def _gpu(operation: str, entry: str, prepare: str = "") -> tuple[Implementation, Implementation]:
    """Triton's, and torch's of the same name."""
    return (
        Implementation(operation, GPU_KINDS, "triton", f"hetero_ee_kernels.{entry}", prepare, is_capturable=True),
        Implementation(operation, GPU_KINDS, "torch", f"hetero_ee_kernels.reference:{entry.split(':')[1]}", prepare),
    )


def _cpu(
    operation: str, entry: str, reference: str = "hetero_ee.runtime.torch_ops:TorchOps"
) -> Iterator[Implementation]:
    """Numba's, and what its results are checked against."""
    yield Implementation(operation, ("cpu",), "numba", f"hetero_ee_cpu_ops.{entry}")
    yield Implementation(operation, ("cpu",), "torch", reference)


_BITSANDBYTES = Implementation(
    "matmul_int4",
    ("cuda",),
    "bitsandbytes",
    "hetero_ee.runtime.gpu.bitsandbytes_matmul:matmul",
    "hetero_ee.runtime.gpu.bitsandbytes_matmul:bitsandbytes_matrix",
)
_TILES = "hetero_ee.runtime.gpu.device_weights:tile_matrix"
_INT4 = _gpu("matmul_int4", "matmul:matmul", prepare=_TILES)
IMPLEMENTATIONS = (
    _INT4[0],
    _BITSANDBYTES,
    _INT4[1],
    *_gpu("matmul_int8", "matmul:matmul", prepare=_TILES),
    *_gpu("sliced_head", "sliced_head:sliced_head", prepare=_TILES),
    *_gpu("quantize", "quantize:quantize"),
    *_gpu("argmax", "argmax:argmax"),
    *_gpu("rms_norm", "norm:rms_norm"),
    *_gpu("layer_norm", "norm:layer_norm"),
    *_gpu("rms_norm_heads", "norm:rms_norm_heads"),
    *_gpu("activate", "activate:activate"),
    *_gpu("kv_write", "kv_write:kv_write"),
    *_gpu("attention", "attention:attention"),
    *_gpu("exit_predictor", "exit_predictor:exit_predictor"),
    *_cpu("matmul_int4", "matmul:Matmul"),
    *_cpu("matmul_int8", "matmul:Matmul"),
    *_cpu("rms_norm", "norm:rms_norm"),
    *_cpu("layer_norm", "norm:layer_norm"),
    *_cpu("rms_norm_heads", "norm:rms_norm_heads"),
    *_cpu("rope", "rope:Rope"),
    *_cpu("activate", "activate:activate"),
    *_cpu("kv_write", "kv_write:KvWrite", "hetero_ee.runtime.kv.cpu:CpuKvCache"),
    *_cpu("attention", "attention:Attention"),
)
