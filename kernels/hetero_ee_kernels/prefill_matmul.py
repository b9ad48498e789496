"""y[m, N] = 2^e x[m, K] W^T for many rows, W in int4 or int8 tiles (docs/FORMAT.md), x in fp16, on tensor cores.

A program expands tiles of W to fp16, entry x (scale / 256), and multiplies them with rows of x by tl.dot, which sums in
fp32. An entry is exact in fp16; its product with the scale is rounded once, relative 2^-12. A 256th of the scale keeps
every product finite; the result takes it back. A row's bits depend on the block, which follows from m: a prefill is to
be cut alike whenever its result must be the same.
Before Ampere (sm_75) tl.dot compiles to fp32 multiply-adds: right, but `matmul` in pieces of 16 rows does a quarter of
its instructions. Source: derived.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.compilation import Compilation
from hetero_ee_kernels.tile_group import codebook_entries, join4
from hetero_ee_kernels.tile_kinds import BYTES, CODEBOOK, GCN, LINEAR, PTX
from hetero_ee_kernels.tile_matrix import TileMatrix, check_rows, instructions, output

SCALE_SHIFT = tl.constexpr(1 / 256)


@dataclass(frozen=True, slots=True)
class Block:
    """What one program computes: rows of x, rows of W, columns a step; and its warps and pipeline stages."""

    m: int
    n: int
    k: int
    n_warps: int
    n_stages: int


BLOCKS = (Block(16, 64, 64, 4, 3), Block(32, 64, 32, 4, 3), Block(64, 64, 32, 4, 4), Block(128, 128, 32, 8, 3))
BLOCKS_AMD = BLOCKS[:3]  # the largest would leave a vector unit too few registers for its share
BLOCKS_TURING = (Block(16, 32, 32, 4, 1),)  # sums are in each thread's registers there, which larger blocks outgrow


@triton.jit
def half_bytes(words: tl.tensor) -> Any:
    """Words of 4 signed bytes -> their values in fp16, (..., 4): 1024 + 128 + value by its bits, less 1152."""
    return join4((half_byte(words, 0), half_byte(words, 8), half_byte(words, 16), half_byte(words, 24)))


@triton.jit
def half_byte(words: tl.tensor, SHIFT: tl.constexpr) -> Any:
    bits = (((words >> SHIFT) & 255) ^ 0x6480).to(tl.int16)
    return bits.to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def half_nibbles(words: tl.tensor, SHIFT: tl.constexpr) -> Any:
    """The codes at bits SHIFT, SHIFT + 8, + 16 and + 24, less 8, in fp16, (..., 4)."""
    first = ((words >> SHIFT) & 15 | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    second = ((words >> (SHIFT + 8)) & 15 | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    third = ((words >> (SHIFT + 16)) & 15 | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    fourth = ((words >> (SHIFT + 24)) & 15 | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    return join4((first, second, third, fourth))


@triton.jit
def expanded(words: tl.tensor, scales: tl.tensor, table: tl.tensor, KIND: tl.constexpr, ISA: tl.constexpr) -> Any:
    """Words (blocks, groups, lines, 16) and scales (blocks, groups, 16) -> fp16 (16 blocks, 32 groups)."""
    B: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    scales = (scales * SCALE_SHIFT)[:, :, None, :, None]
    if KIND == 2:
        values = half_bytes(words) * scales  # b g j r c
        values = tl.permute(values, (0, 3, 1, 2, 4))
    else:
        if KIND == 0:
            low, high = half_nibbles(words, 0), half_nibbles(words, 4)
        else:
            low_words, high_words = codebook_entries(words, table, ISA)
            low, high = half_bytes(low_words), half_bytes(high_words)
        values = tl.join(low * scales, high * scales)  # b g j r c half
        values = tl.permute(values, (0, 3, 1, 5, 2, 4))
    return tl.reshape(values, (16 * B, 32 * G))


@triton.jit
def prefill_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    m: tl.tensor,
    n_rows: tl.tensor,
    n_columns: tl.tensor,
    n_groups: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    n_parts = (m + BLOCK_M - 1) // BLOCK_M
    row = tl.program_id(0) % n_parts * BLOCK_M + tl.arange(0, BLOCK_M)
    first_block = tl.program_id(0) // n_parts * (BLOCK_N // 16)
    block = tl.minimum(first_block + tl.arange(0, BLOCK_N // 16), (n_rows + 15) // 16 - 1).to(tl.int64)
    group, within = tl.arange(0, BLOCK_K // 32), tl.arange(0, 16)
    LINES: tl.constexpr = 8 if KIND == 2 else 4
    tile = block[:, None] * n_groups + group[None, :]
    line_word = tl.arange(0, LINES)[:, None] * 16 + within[None, :]
    w_at = words_ptr + ((tile * (16 * LINES))[:, :, None, None] + line_word[None, None])
    scales_at = scales_ptr + ((tile * 16)[:, :, None] + within[None, None])
    column = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (tl.minimum(row, m - 1).to(tl.int64)[:, None] * n_columns + column[None, :])
    if KIND == 1:
        table = (tl.load(table_ptr), tl.load(table_ptr + 1), tl.load(table_ptr + 2), tl.load(table_ptr + 3))
    else:
        table = (0, 0, 0, 0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, n_groups, BLOCK_K // 32):
        if EVEN_K:
            words = tl.load(w_at)
            scales = tl.load(scales_at)
            x = tl.load(x_at)
        else:
            inside = first + group < n_groups
            words = tl.load(w_at, mask=inside[None, :, None, None], other=0)
            scales = tl.load(scales_at, mask=inside[None, :, None], other=0.0)
            x = tl.load(x_at, mask=(first * 32 + column < n_columns)[None, :], other=0.0)
        w = expanded(words, scales, table, KIND, ISA)
        total = tl.dot(x, tl.trans(w), total)
        w_at += BLOCK_K // 32 * 16 * LINES
        scales_at += BLOCK_K // 32 * 16
        x_at += BLOCK_K
    n = first_block * 16 + tl.arange(0, BLOCK_N)
    out_at = out_ptr + (row.to(tl.int64)[:, None] * n_rows + n[None])
    tl.store(out_at, total * factor, mask=(row < m)[:, None] & (n < n_rows)[None])


def prefill_matmul(x: Any, weight: TileMatrix, out: Any = None) -> Any:
    """x: fp16 (m, K), contiguous; out: fp32 (m, n_rows), allocated where None. Returns out.

    Raises ValueError where they don't fit.
    """
    check_rows(x, weight, (torch.float16,))
    m, n_columns = x.shape
    out = output(out, (m, weight.n_rows), x.device)
    if m:
        block = block_for(m, _blocks(x))
        prefill_kernel[(-(-m // block.m) * -(-weight.n_rows // block.n),)](
            weight.words,
            weight.scales,
            weight.table,
            x,
            out,
            weight.factor * 256,
            m,
            weight.n_rows,
            n_columns,
            weight.n_groups,
            BLOCK_M=block.m,
            BLOCK_N=block.n,
            BLOCK_K=block.k,
            EVEN_K=n_columns % block.k == 0,
            KIND=weight.kind,
            ISA=instructions(x),
            num_warps=block.n_warps,
            num_stages=block.n_stages,
        )
    return out


def block_for(m: int, blocks: tuple[Block, ...]) -> Block:
    """The smallest that holds m rows, or else the largest."""
    return next((block for block in blocks if block.m >= m), blocks[-1])


def _blocks(x: Any) -> tuple[Block, ...]:
    """Those for the card that x lies on."""
    if instructions(x) == GCN:
        return BLOCKS_AMD
    is_turing = instructions(x) == PTX and torch.cuda.get_device_capability(x.device) < (8, 0)
    return BLOCKS_TURING if is_turing else BLOCKS


def compilations() -> list[Compilation]:
    """Every kind of tile at every block."""
    signature = {"words_ptr": "*i32", "scales_ptr": "*fp16", "table_ptr": "*i32", "x_ptr": "*fp16", "out_ptr": "*fp32"}
    signature |= {"factor": "fp32"} | dict.fromkeys(("m", "n_rows", "n_columns", "n_groups"), "i32")
    return [
        Compilation(
            f"prefill_{name}_{block.m}x{block.n}{'' if isa == PTX else '_amd'}",
            prefill_kernel,
            signature,
            {"BLOCK_M": block.m, "BLOCK_N": block.n, "BLOCK_K": block.k, "EVEN_K": True, "KIND": kind, "ISA": isa},
            block.n_warps,
            block.n_stages,
            is_memory_bound=False,
            runs_on_hip=isa == GCN,
            runs_on_cuda=isa == PTX,
            needs_tensor_cores=block not in BLOCKS_TURING,
        )
        for kind, name in ((LINEAR, "linear"), (CODEBOOK, "codebook"), (BYTES, "int8"))
        for block, isa in [(b, PTX) for b in BLOCKS_TURING + BLOCKS] + [(BLOCKS_AMD[-1], GCN)]
    ]
