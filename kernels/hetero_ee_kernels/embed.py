"""Look up rows of a quantized embedding matrix: out[r] = W[ids[r]], + P[positions[r] + offset] if P is learned.

W[n, k] = (scale x 2^e) x entry, each product and the sum rounded to fp32: the bits are those of the CPU's embed.py.
Layout: int4 or int8 tiles (docs/FORMAT.md); P fp32 (positions, K); ids and positions int32 in device memory, whose
values are not checked. Source: derived.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check, output
from hetero_ee_kernels.tile_matrix import BYTES, GROUP, TileMatrix, check_vocabulary

BLOCK, N_WARPS = 512, 4


@triton.jit
def embed_kernel(
    tiles_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    codebook_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    learned_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    n_columns: tl.tensor,
    n_groups: tl.tensor,
    OFFSET: tl.constexpr,
    IS_INT8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n_columns
    token = tl.load(ids_ptr + row).to(tl.int64)
    tile = token // 16 * n_groups + column // 32
    within = column % 32
    if IS_INT8:
        entry_at = tiles_ptr + tile * 512 + 64 * (within // 4) + 4 * (token % 16) + within % 4
    else:
        byte_at = tiles_ptr + tile * 256 + 64 * (within % 16 // 4) + 4 * (token % 16) + within % 4
        byte = tl.load(byte_at, mask=inside, other=0).to(tl.int32)
        entry_at = codebook_ptr + tl.where(within < 16, byte & 15, byte >> 4)
    entry = tl.load(entry_at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + tile * 16 + token % 16, mask=inside, other=0.0).to(tl.float32) * factor
    x = entry * scale
    if learned_ptr is not None:
        at = (tl.load(positions_ptr + row).to(tl.int64) + OFFSET) * n_columns + column
        x += tl.load(learned_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + row * n_columns + column, x, mask=inside)


def embed(
    ids: Any,
    weight: TileMatrix,
    n_columns: int,
    out: Any = None,
    *,
    learned: Any = None,
    positions: Any,
    offset: int = 0,
) -> Any:
    """Look up the rows `ids` and return out.

    Args:
        ids, positions: int32 (m,), ids below weight.n_rows.
        learned: None, or fp32 (n, n_columns) with a row for each position + offset.
        out: fp32 (m, n_columns), allocated if None.

    Raises:
        ValueError: if a shape, dtype or layout does not fit.
    """
    m = len(ids)
    check("ids", ids, (m,), torch.int32)
    check("positions", positions, (m,), torch.int32)
    check_vocabulary(weight)
    if -(-n_columns // GROUP) != weight.n_groups:
        raise ValueError(f"{n_columns} columns do not fill the {weight.n_groups} groups of 32 in the tiles.")
    if learned is not None:
        check("learned", learned, (len(learned), n_columns))
    out = output(out, ids, (m, n_columns))
    if m:
        embed_kernel[(m, triton.cdiv(n_columns, BLOCK))](
            weight.tiles, weight.scales, weight.table.view(torch.int8), ids, learned, positions, out, weight.factor,
            n_columns, weight.n_groups, offset, weight.kind == BYTES, BLOCK, num_warps=N_WARPS, **UNFUSED,
        )  # fmt: skip
    return out
