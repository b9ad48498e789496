"""Batch of an embedding matrix in tiles: out[r] = W[ids[r]], fp32 or fp16 (m, K), ids on the device.

The product scale x 2^exponent is rounded to fp32, then entry x that, as in the torch reference: fp32 bits are the same.
An id that has no row gives a row of NaN: the ids are never seen by the CPU, which could refuse them.
Layout: docs/FORMAT.md. A row is scattered over its block's tiles, 4 bytes in every 64, and read once a token.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.compilation import Compilation
from hetero_ee_kernels.tile_kinds import BYTES, CODEBOOK, LINEAR
from hetero_ee_kernels.tile_matrix import TileMatrix

COLUMNS = 1024  # a program: 8 a thread
N_WARPS = 4


@triton.jit
def embed_kernel(
    tiles_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    n_rows: tl.tensor,
    n_columns: tl.tensor,
    n_groups: tl.tensor,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    token = tl.load(ids_ptr + tl.program_id(0))
    known = (token >= 0) & (token < n_rows)
    row = tl.where(known, token, 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n_columns
    within = column % 32
    tile = row // 16 * n_groups + column // 32
    if KIND == 2:
        byte = within // 4 * 64 + row % 16 * 4 + within % 4
        entry = tl.load(tiles_ptr + (tile * 512 + byte), mask=inside, other=0).to(tl.int8, bitcast=True)
    else:
        byte = within % 16 // 4 * 64 + row % 16 * 4 + within % 4
        codes = tl.load(tiles_ptr + (tile * 256 + byte), mask=inside, other=0)
        entry = tl.load(table_ptr + tl.where(within < 16, codes & 15, codes >> 4))
    scale = tl.load(scales_ptr + (tile * 16 + row % 16), mask=inside, other=0.0).to(tl.float32) * factor
    value = tl.where(known, entry.to(tl.float32) * scale, float("nan"))
    out_at = out_ptr + tl.program_id(0).to(tl.int64) * n_columns + column
    tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=inside)


def embed(weight: TileMatrix, n_columns: int, ids: Any, out: Any = None) -> Any:
    """ids: int64 (m,) on the weight's device; out: fp32 or fp16 (m, n_columns), fp32 allocated where None. Returns out.

    Raises ValueError for other shapes, dtypes or layouts.
    """
    if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous() or ids.device != weight.tiles.device:
        raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected contiguous torch.int64 (m,).")
    shape = (len(ids), n_columns)
    out = torch.empty(shape, dtype=torch.float32, device=ids.device) if out is None else out
    fits = tuple(out.shape) == shape and out.dtype in (torch.float32, torch.float16) and out.is_contiguous()
    if not fits or -(-n_columns // 32) != weight.n_groups or out.device != ids.device:
        raise ValueError(f"tiles {tuple(weight.tiles.shape)} don't give {len(ids)} ids to out {tuple(out.shape)}.")
    if len(ids):
        embed_kernel[(len(ids), -(-n_columns // COLUMNS))](
            weight.tiles.view(torch.uint8),
            weight.scales,
            weight.table.view(torch.int8),
            ids,
            out,
            weight.factor,
            weight.n_rows,
            n_columns,
            weight.n_groups,
            COLUMNS=COLUMNS,
            KIND=weight.kind,
            num_warps=N_WARPS,
        )
    return out


def compilations() -> list[Compilation]:
    """Every kind of tile."""
    signature = {"tiles_ptr": "*u8", "scales_ptr": "*fp16", "table_ptr": "*i8", "ids_ptr": "*i64", "out_ptr": "*fp32"}
    signature |= {"factor": "fp32", "n_rows": "i32", "n_columns": "i32", "n_groups": "i32"}
    return [
        Compilation(
            f"embed_{name}",
            embed_kernel,
            signature,
            {"COLUMNS": COLUMNS, "KIND": kind},
            N_WARPS,
            1,
            is_memory_bound=False,
            runs_on_hip=True,
        )
        for kind, name in ((LINEAR, "linear"), (CODEBOOK, "codebook"), (BYTES, "int8"))
    ]
