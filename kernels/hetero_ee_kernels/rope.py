"""Rotary position embedding, fp32, in place: turns pairs (i, i + n/2) of the first n features of each head.

x[i]       <- x[i] cos(p f_i) - x[i + n/2] sin(p f_i)
x[i + n/2] <- x[i + n/2] cos(p f_i) + x[i] sin(p f_i)         i < n/2, p the row's position, f_i the inverse frequency
(arXiv 2104.09864, section 3.2; pairing as in Llama.)

Layout: x (m, features) contiguous; heads lie side by side from feature `first` on. Cosines and sines come from
`rope_table`: accurate at any position, where a kernel's own sine of a large angle costs registers and a slow path.
Positions are read from device memory and must lie in the table. Decoding uses kv_write.py, which turns on the way.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import check
from hetero_ee_kernels.compilation import Compilation

N_WARPS = 1  # a head is 64 to 256 features


@triton.jit
def turned(low: tl.tensor, high: tl.tensor, cosine: tl.tensor, sine: tl.tensor) -> Any:
    """The two halves of a head after the turn."""
    return low * cosine - high * sine, high * cosine + low * sine


@triton.jit
def rope_kernel(
    x_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    table_ptr: tl.tensor,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    turn = table_ptr + tl.load(positions_ptr + row).to(tl.int64) * (2 * HALF) + lane
    cosine, sine = tl.load(turn, mask=inside, other=0.0), tl.load(turn + HALF, mask=inside, other=0.0)
    at = x_ptr + row.to(tl.int64) * FEATURES + FIRST + tl.program_id(1) * HEAD_DIM + lane
    low, high = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    low, high = turned(low, high, cosine, sine)
    tl.store(at, low, mask=inside)
    tl.store(at + HALF, high, mask=inside)


def rope(x: Any, positions: Any, table: Any, first: int, n_heads: int, head_dim: int) -> None:
    """x: fp32 (m, features), changed in place; positions: int32 (m,); table: rope_table's, fp32 (p, 2, n/2).

    Raises ValueError for other shapes, dtypes or layouts.
    """
    (m, features), half = x.shape, table.shape[2]
    check("x", x, (m, features))
    check("positions", positions, (m,), torch.int32)
    check("table", table, (table.shape[0], 2, half))
    if first < 0 or n_heads < 0 or 2 * half > head_dim or first + n_heads * head_dim > features:
        raise ValueError(
            f"{n_heads} heads of {head_dim} from feature {first}, {2 * half} turning, are not in {features}."
        )
    if m and n_heads:
        sizes = (features, first, head_dim, half, triton.next_power_of_2(half))
        rope_kernel[(m, n_heads)](x, positions, table, *sizes, num_warps=N_WARPS)


def compilations() -> list[Compilation]:
    """Queries and keys of 32 + 8 heads of 128."""
    arguments = {"x_ptr": "*fp32", "positions_ptr": "*i32", "table_ptr": "*fp32"}
    sizes = {"FEATURES": 6144, "FIRST": 0, "HEAD_DIM": 128, "HALF": 64, "BLOCK": 64}
    return [Compilation("rope", rope_kernel, arguments, sizes, N_WARPS, 1, False, True)]
