"""Argmax of each row of logits (m, n), fp32: the lowest id wins a tie.

A value becomes an integer key of the same order (sign and magnitude to two's complement, -0 to +0), and the winner of
any set of (key, id) is the greatest of key * 2^32 - id: that is the same however the set is cut. NaN counts as greater
than everything, as in NumPy and torch, so a row with NaN gives its first NaN. Layout: rows contiguous; 1 <= n < 2^31.
Two launches: one program for each 4096 logits, then one for each row.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED

PIECE = 4096  # logits a program: 8 of each thread, and 32,000 are 8 programs a row
LOWEST = tl.constexpr(-(2**63))
NAN_KEY = tl.constexpr(2**31 - 1)  # above every number's
N_WARPS, ROW_WARPS = 8, 1


@triton.jit
def piece_kernel(logits_ptr: tl.tensor, best_ptr: tl.tensor, n: tl.tensor, PIECE: tl.constexpr) -> None:
    """best[row, piece]: the greatest key * 2^32 - id of the piece."""
    token = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = token < n
    value = tl.load(logits_ptr + tl.program_id(0).to(tl.int64) * n + token, mask=inside, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)
    packed = tl.where(inside, key.to(tl.int64) * 4294967296 - token, LOWEST)
    tl.store(best_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(packed, 0))


@triton.jit
def row_kernel(best_ptr: tl.tensor, out_ptr: tl.tensor, n_pieces: tl.tensor, PIECES: tl.constexpr) -> None:
    piece = tl.arange(0, PIECES)
    row = tl.program_id(0)
    packed = tl.load(best_ptr + row * n_pieces + piece, mask=piece < n_pieces, other=LOWEST)
    tl.store(out_ptr + row, -tl.max(packed, 0) & 0xFFFFFFFF)


def argmax(logits: Any, out: Any = None) -> Any:
    """logits: fp32 (m, n); out: int64 (m,), allocated where None. Returns out: each row's winning id.

    Raises ValueError for other shapes, dtypes or layouts.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous() or not logits.shape[1]:
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, expected contiguous torch.float32 (m, n).")
    m, n = logits.shape
    out = torch.empty(m, dtype=torch.int64, device=logits.device) if out is None else out
    if tuple(out.shape) != (m,) or out.dtype != torch.int64 or not out.is_contiguous() or out.device != logits.device:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, expected contiguous torch.int64 {(m,)}.")
    if m:
        n_pieces = -(-n // PIECE)
        best = torch.empty((m, n_pieces), dtype=torch.int64, device=logits.device)
        piece_kernel[(m, n_pieces)](logits, best, n, PIECE, num_warps=N_WARPS, **UNFUSED)
        row_kernel[(m,)](best, out, n_pieces, triton.next_power_of_2(n_pieces), num_warps=ROW_WARPS, **UNFUSED)
    return out
