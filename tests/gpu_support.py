"""What the tests of GPU operations share: where they run, poisoned and guarded outputs, exact comparison."""

import os
from typing import Any

import torch

# The compute capability, such as 86, whose compiled PTX is executed (tests/gpu/ptx) instead of Triton's interpreter.
PTX_ARCHITECTURE = int(os.environ.get("PTX_ARCHITECTURE", "0"))
HAS_PTX_JITTER = os.environ.get("PTX_JITTER") == "1"  # approximate instructions are off, as hardware's may be
# Whether this process needs no GPU. TRITON_INTERPRET is Triton's own switch.
IS_INTERPRETED = PTX_ARCHITECTURE > 0 or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu"
GUARD_ELEMENTS = 64


def can_run_kernels() -> bool:
    """Whether this process can launch Triton kernels: on a GPU, or in Triton's interpreter."""
    return IS_INTERPRETED or torch.cuda.is_available()


class Guarded:
    """An output on the device, full of NaN (integers: of their smallest), between elements that nobody may write."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        n = int(torch.tensor(shape).prod())
        poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        self._all = torch.full((n + 2 * GUARD_ELEMENTS,), poison, dtype=dtype, device=DEVICE)
        self._guards = torch.arange(1, 2 * GUARD_ELEMENTS + 1, device=DEVICE).to(dtype)
        self._all[:GUARD_ELEMENTS], self._all[-GUARD_ELEMENTS:] = self._guards.chunk(2)
        self.tensor = self._all[GUARD_ELEMENTS:-GUARD_ELEMENTS].view(shape)

    def check(self) -> torch.Tensor:
        """The output, once it is certain that nothing beside it was written."""
        low, high = self._guards.chunk(2)
        assert torch.equal(self._all[:GUARD_ELEMENTS], low), "elements before the output were written"
        assert torch.equal(self._all[-GUARD_ELEMENTS:], high), "elements after the output were written"
        return self.tensor


def guarded_copy(values: torch.Tensor) -> Guarded:
    """A guarded tensor that starts with these values, for operations in place."""
    guarded = Guarded(tuple(values.shape), values.dtype)
    guarded.tensor.copy_(values)
    return guarded


def random(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers on the device, the same for a seed wherever that is."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_same_bits(first: torch.Tensor, second: torch.Tensor) -> None:
    assert first.dtype == second.dtype and first.shape == second.shape
    assert bytes_of(first) == bytes_of(second)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def error(found: Any, expected: torch.Tensor) -> float:
    """Largest error over the largest expected magnitude; infinite where NaN is not met by NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    found, expected = found.nan_to_num(), expected.nan_to_num()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if found.numel() else 0.0
