"""The sparse FFN as its definition says, in plain numpy, slow; and what its tests share.

Written apart from the kernel: the bits must agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero_ee_cpu_ops.neurons.rows import RowMatrix

F32 = np.float32
LINEAR = tuple(range(-8, 8))
FITTED = (-32, -24, -18, -14, -10, -7, -4, -1, 1, 4, 7, 10, 14, 19, 25, 32)
SETS: dict[str, Callable[[Any], Any]] = {
    "none": lambda active: active * 0,
    "one": lambda active: active * (np.arange(active.shape[1]) == active.shape[1] // 2),
    "all": lambda active: active,
    "alternating": lambda active: active * (np.arange(active.shape[1]) % 2),
    "even blocks": lambda active: active * (np.arange(active.shape[1]) // 128 % 2 == 0),
    "another for each token": lambda active: active * ((np.arange(active.size).reshape(active.shape) % 7) == 0),
}


@dataclass
class Rows:
    """An int4 matrix (N, K) by its unpacked codes (N, Kp) and scales (N, Kp / 32); Kp: K padded to 64."""

    codes: Any
    scales: Any
    exponent: int
    codebook: tuple[int, ...]
    n_columns: int

    @classmethod
    def random(cls, shape: tuple[int, int], codebook: tuple[int, ...], exponent: int, seed: int) -> "Rows":
        random, (n, k) = np.random.default_rng(seed), shape
        padded = -(-k // 64) * 64
        codes = random.integers(0, 16, (n, padded), np.uint8)
        scales = (random.random((n, padded // 32)) * 200 + 20).astype(np.float16)
        scales *= np.where(random.random(scales.shape) < 0.5, F32(-1), F32(1)).astype(np.float16)
        scales[:, -(-k // 32) :] = 0
        return cls(codes, scales, exponent, codebook, k)

    def packed(self) -> tuple[Any, Any]:
        """Codes as they are stored, and scales."""
        units = self.codes.reshape(len(self.codes), -1, 2, 32)
        return np.ascontiguousarray((units[:, :, 0] | units[:, :, 1] << 4).reshape(len(self.codes), -1)), self.scales

    def first(self, n_rows: int) -> "Rows":
        return replace(self, codes=self.codes[:n_rows], scales=self.scales[:n_rows])

    def matrix(self) -> RowMatrix:
        return RowMatrix(*self.packed(), self.exponent, self.codebook, self.n_columns)

    def entries(self) -> Any:
        return np.array(self.codebook, np.int64)[self.codes]

    def dequantized(self) -> Any:
        """float64 (N, K)."""
        values = self.entries() * np.repeat(self.scales.astype(np.float64), 32, 1) * 2.0**self.exponent
        return values[:, : self.n_columns]


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of fp32, rounded once: the product is exact in float64, the sum is rounded to odd there."""
    product, c = a.astype(np.float64) * b, np.asarray(c, np.float64)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    is_even = np.ascontiguousarray(total).view(np.int64) & 1 == 0
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & is_even & np.isfinite(total), nudged, total).astype(F32)


def quantized(x: Any, n_groups: int) -> tuple[Any, Any]:
    """One token's int8 codes (G, 32) and scales (G,)."""
    groups = np.zeros((n_groups, 32), F32)
    groups.reshape(-1)[: len(x)] = x
    largest = np.abs(groups).max(1)
    inverse = np.where(largest < 1e-30, F32(0), F32(127) / largest).astype(F32)
    codes = np.nan_to_num(np.rint(groups * inverse[:, None]), nan=0).astype(np.int64)
    return codes, np.where(largest < 1e-30, F32(0), largest / F32(127)).astype(F32)


def products(x: Any, up: Rows) -> Any:
    """u of every neuron, without the exponent, fp32 (N,)."""
    n, n_groups = len(up.codes), up.codes.shape[1] // 32
    codes, scales = quantized(x, n_groups)
    sums = (up.entries().reshape(n, n_groups, 32) * codes).sum(-1).astype(F32)
    factors, total = up.scales.astype(F32) * scales, np.zeros(n, F32)
    for group in range(n_groups):
        total = fused(sums[:, group], factors[:, group], total)
    return total


@np.errstate(all="ignore")
def section_sums(h: Any, down: Rows) -> list[Any]:
    """Of one token's h (N,), every section's sum, fp32 (Kp,)."""
    n, width = down.codes.shape
    n_blocks = -(-n // 128)
    per_section = -(-n_blocks // 32)
    entries, sums = down.entries(), []
    for block in range(n_blocks):
        rows = slice(128 * block, 128 * block + 128)
        values = (h[rows, None] * down.scales[rows].astype(F32)).astype(F32)
        values[h[rows] == 0] = 0
        largest = np.abs(values).max(0)
        steps = np.where(largest < 1e-30, F32(0), F32(127) / largest).astype(F32)
        weights = np.nan_to_num(np.rint(values * steps), nan=0).astype(np.int64)
        factor = np.where(largest < 1e-30, F32(0), largest / F32(127)).astype(F32)
        total = (entries[rows] * np.repeat(weights, 32, 1)).sum(0).astype(F32)
        if block % per_section == 0:
            sums.append(np.zeros(width, F32))
        sums[-1] = fused(total, np.repeat(factor, 32), sums[-1])
    return sums


@np.errstate(all="ignore")
def reference(x: Any, active: Any, up: Rows | None, down: Rows, section: int | None = None) -> Any:
    """y (m, K); with a section: the sum from it on, without the exponent."""
    rows = []
    for token in range(len(active)):
        h = active[token]
        if up is not None:
            h = np.where(h != 0, h * (products(x[token], up) * F32(2.0**up.exponent)), F32(0)).astype(F32)
        total = np.zeros(down.codes.shape[1], F32)
        for part in section_sums(h, down)[section or 0 :][::-1]:
            total = total + part
        rows.append(total * F32(2.0**down.exponent if section is None else 1))
    return np.array(rows, F32).reshape(len(active), -1)[:, : down.n_columns]


@np.errstate(all="ignore")
def masked_reference(x: Any, scores: Any, first: Rows, bias: Any = None, may_skip: Any = None) -> Any:
    """The first matrix times x, 0 where a score of a token that may skip is not positive (masked_linear.py)."""
    out = np.zeros((len(x), len(first.codes)), F32)
    for token, row in enumerate(x):
        values = products(row, first) * F32(2.0**first.exponent)
        values = values if bias is None else values + bias
        is_wanted = scores[token] > 0 if may_skip is not None and may_skip[token] else True
        out[token] = np.where(is_wanted, values, F32(0))
    return out
