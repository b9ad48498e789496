"""Look up rows of a quantized embedding matrix: out[r] = W[ids[r]], fp32 (m, K).

W[n, k] = factor x scales[n, k // 32] x entry[n, k], where entry is codebook[code] in int4 tiles and the value itself in
int8 tiles. scale x factor is rounded to fp32 before it is multiplied by the entry, as in the torch reference, so the
bits are the same. Layout: docs/FORMAT.md; tiles (N/16, K/32, 256 or 512), scales (N/16, K/32, 16) as uint16 bits of
fp16, with N and K padded.

A row of 4,096 costs 7 us from int4 tiles, 3.6 us from int8 (Zen 5, one thread, Nov 2026). It is needed once per token,
hence plain loops and one thread.
"""

from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import array_in, array_out, entry
from hetero_ee_cpu_ops.simd.floats import first_lane, load_lanes

HALF = np.uint16(0)  # type of a stored scale
SCALES, IDS, OUT = array_in(types.uint16, 3), array_in(types.int64, 1), array_out(types.float32, 2)


@inner
def _bad_ids(ids: Any, n_rows: int) -> bool:
    bad = False
    for token in ids:
        bad = bad or token < 0 or token >= n_rows
    return bad


@inner
def _bad_shapes(tiles: Any, scales: Any, ids: Any, n_rows: int, out: Any) -> bool:
    n_blocks, n_groups, _ = tiles.shape
    if scales.shape != (n_blocks, n_groups, 16) or n_rows > 16 * n_blocks or _bad_ids(ids, n_rows):
        return True
    return out.shape[0] != ids.size or not 32 * (n_groups - 1) < out.shape[1] <= 32 * n_groups


@inner
def _row_factor(scales: Any, block: int, group: int, row: int, factor: float) -> Any:
    at = scales.ctypes.data + 2 * ((block * scales.shape[1] + group) * 16 + row)
    return np.float32(first_lane(load_lanes(at, 0, 1, HALF)) * np.float32(factor))


@entry(
    types.int64(array_in(types.uint8, 3), SCALES, types.float64, array_in(types.int8, 1), types.int64, IDS, OUT)
)  # fmt: skip
def _int4(tiles: Any, scales: Any, factor: float, codebook: Any, n_rows: int, ids: Any, out: Any) -> int:
    """Look up rows of int4 tiles. Return 0, or 1 without writing anything if a shape or an id is wrong."""
    if tiles.shape[2] != 256 or codebook.size != 16 or _bad_shapes(tiles, scales, ids, n_rows, out):
        return 1
    n_columns = out.shape[1]
    for r in range(ids.size):
        block, row = ids[r] // 16, ids[r] % 16
        for k in range(n_columns):
            group, within = k // 32, k % 32
            if within == 0:
                step = _row_factor(scales, block, group, row, factor)
            byte = np.intp(tiles[block, group, 64 * (within % 16 // 4) + 4 * row + within % 4])
            code = byte & 15 if within < 16 else byte >> 4
            out[r, k] = np.float32(codebook[code]) * step
    return 0


@entry(types.int64(array_in(types.int8, 3), SCALES, types.float64, types.int64, IDS, OUT))
def _int8(tiles: Any, scales: Any, factor: float, n_rows: int, ids: Any, out: Any) -> int:
    """Look up rows of int8 tiles. Return 0, or 1 without writing anything if a shape or an id is wrong."""
    if tiles.shape[2] != 512 or _bad_shapes(tiles, scales, ids, n_rows, out):
        return 1
    n_columns = out.shape[1]
    for r in range(ids.size):
        block, row = ids[r] // 16, ids[r] % 16
        for k in range(n_columns):
            group, within = k // 32, k % 32
            if within == 0:
                step = _row_factor(scales, block, group, row, factor)
            out[r, k] = np.float32(tiles[block, group, 64 * (within // 4) + 4 * row + within % 4]) * step
    return 0


def embed_int4(
    tiles: Any, scales: Any, factor: float, codebook: Any, shape: tuple[int, int], ids: Any, out: Any = None
) -> Any:
    """Look up rows of an int4 matrix.

    Args:
        tiles: uint8 (N/16, K/32, 256), N and K padded.
        scales: uint16 bits of fp16, (N/16, K/32, 16).
        factor: a power of two.
        codebook: int8 (16,).
        shape: (N, K) without padding.
        ids: int64 (m,), each 0..N-1.

    Returns:
        out, fp32 (m, K), allocated if None.

    Raises:
        ValueError: if a shape, dtype or layout does not fit, or an id has no row.
    """
    out = np.empty((ids.size, shape[1]), np.float32) if out is None else out
    if out.shape[1] != shape[1] or _int4(tiles, scales, factor, codebook, shape[0], ids, out):
        raise ValueError(_complaint(tiles, shape, ids, out))
    return out


def embed_int8(tiles: Any, scales: Any, factor: float, shape: tuple[int, int], ids: Any, out: Any = None) -> Any:
    """Look up rows of an int8 matrix, whose tiles are int8 (N/16, K/32, 512). For the rest, see embed_int4."""
    out = np.empty((ids.size, shape[1]), np.float32) if out is None else out
    if out.shape[1] != shape[1] or _int8(tiles, scales, factor, shape[0], ids, out):
        raise ValueError(_complaint(tiles, shape, ids, out))
    return out


def _complaint(matrix: Any, shape: tuple[int, ...], ids: Any, out: Any) -> str:
    span = f"{ids.min()}..{ids.max()}" if ids.size else "none"
    return f"Ids {ids.shape} in {span} and output {out.shape} do not fit the matrix {shape}, stored as {matrix.shape}."
