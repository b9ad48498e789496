"""Quantize a float matrix to tiles, with one of several deterministic quantizers."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.codebook import Codebook, Integers, codebook_type, safe_inverse
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight

CHUNK_ELEMENTS = 2**16  # weights per chunk of rows, about; a chunk stays in the cache
SCALE_EXPONENT = 14  # a tensor's largest scale is stored in [2^14, 2^15): 29 octaves above fp16's subnormals
# Limits of the power of two that multiplies a tensor's scales: a normal fp32 number, so that dead tensors keep their
# values, and small enough that no weight exceeds fp16's 2^16, far above any model's.
MIN_EXPONENT, MAX_EXPONENT = -126, 16 - SCALE_EXPONENT
SEARCH_STEPS = 4  # trial scales on each side of the plain one; 9 gave 0.3 % less error in twice the time
CODEBOOK_SAMPLE_GROUPS = 2**12  # groups that a codebook is fitted on: four times as many changed the error by 0.1 %
CODEBOOK_ROUNDS = 12
# Of fitted entries: AVX2 code is nearly as fast as with linear codes; with wider ones it is 1.5 times slower.
FITTED_LIMIT = 32
FITTED_TRIALS = 100  # number of evenly spaced sizes tried for the largest entry before rounding
LEAST_FITTED = 0.6  # smallest tried size, as a share of the limit
# Number of times a quantizer changed its bytes for the same weights; stores in the cache are then converted again.
QUANTIZER_CHANGES: dict[str | None, int] = {"codebook": 1, "gguf": 1, "int5": 1, "int6": 1}
DEFAULT_QUANTIZER = "codebook"  # least KL divergence at its size: docs/quality.md
LARGEST_ENTRIES = range(64, 128)  # candidates for the entry of a table's value of largest magnitude


# Runs one function over many arguments, in order: the built-in map, or the map of a pool of threads.
Workers = Callable[..., Iterable[Any]]


def quantize(weight: Tensor, quantizer: str, workers: Workers = map) -> TileWeight:
    """Quantize a float matrix (N, K) by a key of QUANTIZERS. The bytes do not depend on `workers`.

    Raises:
        KeyError: if the quantizer is unknown.
        UsageError: for nf4 if bitsandbytes is not installed.
    """
    return QUANTIZERS[quantizer](weight, workers)


def _normal_float(weight: Tensor, workers: Workers) -> TileWeight:
    """Quantize to NF4 (arXiv 2305.14314) in blocks of 32 with bitsandbytes, and round its table of values to int8."""
    quantize_4bit = _bitsandbytes_quantize_4bit()
    n_rows, magnitude = _chunk_rows(weight), magnitude_of(weight)

    def quantized(first: int) -> tuple[Tensor, Tensor, Tensor]:
        groups = padded_groups(weight[first : first + n_rows]) * 2.0**-magnitude
        packed, state = quantize_4bit(groups, blocksize=layout.TILE_COLUMNS, quant_type="nf4")
        codes = unpacked(packed.flatten()).view(len(groups), -1)
        return layout.pack_int4(codes), state.absmax.view(groups.shape[:2]), state.code

    tiles, absmax, tables = zip(*workers(quantized, range(0, len(weight), n_rows)), strict=True)
    codebook = table_codebook(tables[0])
    assert codebook is not None, "NF4's values are distinct and ascending"
    scales, exponent = to_fp16_scales(torch.cat(absmax) * codebook.unit, magnitude)
    return TileWeight(torch.cat(tiles), layout.pack_scales(scales), exponent, codebook.entries, *weight.shape)


def _eight_bit(weight: Tensor, workers: Workers) -> TileWeight:
    """Quantize to symmetric int8 tiles, for embedding and head."""

    def scales_of(groups: Tensor) -> Tensor:
        return groups.abs().amax(-1) / 127

    def pack(groups: Tensor, inverse: Tensor) -> Tensor:
        targets = (groups * inverse[:, :, None]).round_().clamp_(-127, 127)
        return layout.pack_int8(targets.to(torch.int8).flatten(1))

    return _quantize(weight, scales_of, pack, "int8", None, workers)


def _wide(name: str) -> Callable[[Tensor, Workers], TileWeight]:
    """Return the quantizer for 5- or 6-bit tiles: for each scale's weights it searches the least squared error."""
    integers = Integers(name)

    def scales_of(groups: Tensor) -> Tensor:
        return integers.scales(groups.reshape(len(groups), -1, integers.group_columns), torch.ones(1), SEARCH_STEPS)

    def pack(groups: Tensor, inverse: Tensor) -> Tensor:
        targets = groups.reshape(len(groups), -1, integers.group_columns) * inverse[:, :, None]
        return layout.pack(integers.codes(targets).flatten(1), name)

    return lambda weight, workers: _quantize(weight, scales_of, pack, name, None, workers)


INT4_QUANTIZERS: dict[str, Callable[[Tensor, Workers], TileWeight]] = {
    # A codebook of -32 .. 32 is fitted to each tensor (Lloyd's algorithm with scales), then scales are searched.
    "codebook": lambda weight, workers: _quantize_int4(weight, fit_codebook(weight), SEARCH_STEPS, workers),
    # Each group tries scales around the plain one, and keeps the least squared error.
    "search": lambda weight, workers: _quantize_int4(weight, LINEAR_CODEBOOK, SEARCH_STEPS, workers),
    # The weight of largest magnitude becomes -8, without a search: fast, and the baseline.
    "rtn": lambda weight, workers: _quantize_int4(weight, LINEAR_CODEBOOK, 0, workers),
    "nf4": _normal_float,
}
ROW_QUANTIZERS = ("codebook", "search", "rtn")  # whose entries are small enough for rows of neurons
QUANTIZERS = INT4_QUANTIZERS | {"int5": _wide("int5"), "int6": _wide("int6"), "int8": _eight_bit}


@dataclass(frozen=True, slots=True, eq=False)
class TableCodebook:
    """A codebook of 16 ascending int8 entries for a table of 16 floats: table[c] is about unit x entries[codes[c]]."""

    entries: tuple[int, ...]
    codes: Tensor
    unit: float


def table_codebook(table: Tensor) -> TableCodebook | None:
    """Fit an int8 codebook to a table of 16 values, not all 0; None if two different values would round to one.

    The largest magnitude becomes the integer with the least squared error: 112 for NF4 and 120 for FP4. With 127, the
    errors would be 1.5 and 3 times as large. Equal values (FP4 has a negative zero) share a code. Entries without a
    code fill the codebook.
    """
    values = table.double()
    largest = float(values.abs().max())

    def error(entry: int) -> float:
        scaled = values * (entry / largest)
        return float((scaled.round() - scaled).square().sum()) / entry**2

    best = min(LARGEST_ENTRIES, key=error)
    rounded = [int(value) for value in (values * (best / largest)).round().tolist()]
    used = set(rounded)
    if len(used) < len(set(values.tolist())):
        return None
    spare = [value for value in range(-128, 128) if value not in used]
    entries = sorted(used | set(spare[: 16 - len(used)]))
    codes = torch.tensor([entries.index(value) for value in rounded], dtype=torch.uint8)
    return TableCodebook(tuple(entries), codes, largest / best)


def unpacked(packed: Tensor) -> Tensor:
    """Unpack bytes, uint8 (b,), to 4-bit codes, uint8 (2b,). A byte's high four bits are the first of its two codes."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).flatten()


def to_fp16_scales(scales: Tensor, magnitude: int) -> tuple[Tensor, int]:
    """Convert fp32 scales, in units of 2^magnitude, to fp16 scales and the exponent of their common power of two."""
    largest = scales.abs().max()
    if largest == 0:
        return scales.half(), 0
    exponent = max(int(torch.frexp(largest).exponent) - 1 - SCALE_EXPONENT + magnitude, MIN_EXPONENT)
    return (scales * 2.0 ** (magnitude - exponent)).half(), exponent


def _quantize_int4(weight: Tensor, entries: tuple[int, ...], n_steps: int, workers: Workers) -> TileWeight:
    codebook = codebook_type(weight)(torch.tensor(entries, dtype=torch.float32))
    mask = _column_mask(weight.shape[1])

    def scales_of(groups: Tensor) -> Tensor:
        return codebook.scales(groups, mask, n_steps) if n_steps else codebook.plain_scales(groups)

    return _quantize(weight, scales_of, codebook.tiles, "int4", entries, workers)


def _quantize(
    weight: Tensor,
    scales_of: Callable[[Tensor], Tensor],
    pack: Callable[[Tensor, Tensor], Tensor],
    name: str,
    entries: tuple[int, ...] | None,
    workers: Workers,
) -> TileWeight:
    """Quantize to the layout `name` chunk by chunk: memory holds the weight, its tiles and a chunk per worker.

    `scales_of` maps groups (n, g, 32) to one or two scales of each (n, g or 2 g); `pack` maps groups and inverse stored
    scales to tiles.
    """
    n_rows = _chunk_rows(weight)
    first_rows = range(0, len(weight), n_rows)
    magnitude = magnitude_of(weight)

    def groups_of(first: int) -> Tensor:
        return padded_groups(weight[first : first + n_rows]) * 2.0**-magnitude

    grid, n_scales = layout.tile_grid(*weight.shape), layout.SCALES_A_TILE[name] // layout.TILE_ROWS
    # Filled chunk by chunk, so that no copies fragment memory.
    found = torch.empty(grid[0] * layout.TILE_ROWS, grid[1] * n_scales)
    tiles = torch.empty(*grid, layout.TILE_BYTES[name], dtype=torch.int8 if name == "int8" else torch.uint8)

    def fill_scales(first: int) -> None:
        found[first : first + n_rows] = scales_of(groups_of(first))

    def fill_tiles(first: int) -> None:
        rows = slice(first // layout.TILE_ROWS, (first + n_rows) // layout.TILE_ROWS)
        tiles[rows] = pack(groups_of(first), inverse[first : first + n_rows])

    deque(workers(fill_scales, first_rows), 0)
    scales, exponent = to_fp16_scales(found, magnitude)
    inverse = safe_inverse(scales.float() * 2.0 ** (exponent - magnitude))
    deque(workers(fill_tiles, first_rows), 0)
    packed = layout.pack_numbers(scales.view(len(scales), -1, n_scales))
    return TileWeight(tiles, packed, exponent, entries, *weight.shape)


def _bitsandbytes_quantize_4bit() -> Any:
    """Import bitsandbytes' function without its log message about a missing kernel for multiplications.

    The import needs seconds, so it happens when the quantizer is used.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from bitsandbytes.functional import quantize_4bit
    except ImportError as error:
        raise UsageError(
            "quantizer nf4 needs bitsandbytes, which is not installed here: pip install bitsandbytes, "
            f"or choose quantizer {DEFAULT_QUANTIZER}."
        ) from error
    finally:
        logger.setLevel(level)
    return quantize_4bit


def _chunk_rows(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // (weight.shape[1] * layout.TILE_ROWS)) * layout.TILE_ROWS


def magnitude_of(weight: Tensor) -> int:
    """Return the exponent of the power of two that weights are divided by during quantization, so that none exceeds 1.

    Otherwise squares of weights above 1e19 would overflow in fp32, and those of weights below 1e-19 would vanish.
    """
    largest = torch.stack(torch.aminmax(weight)).abs().max().float()
    return min(max(int(torch.frexp(largest).exponent), MIN_EXPONENT), -MIN_EXPONENT)


def fit_codebook(weight: Tensor, importance: Tensor | None = None) -> tuple[int, ...]:
    """Fit 16 int8 values, with a free scale per group, to a sample of this tensor's groups.

    Args:
        importance: weight of each column's squared errors (K,); None if all count alike.
    """
    groups, mask = _sample_groups(weight, importance)
    kind = codebook_type(weight) if importance is None else Codebook
    entries = torch.special.ndtri((torch.arange(16) + 0.5) / 16)  # quantiles of a Gaussian
    for _ in range(CODEBOOK_ROUNDS):
        entries = entries * (127 / entries.abs().max())
        numerator, denominator = kind(entries).sums(groups, mask, n_steps=2)
        entries = torch.where(denominator > 0, numerator / denominator.clamp_min(1e-30), entries).sort().values
    return _rounded_codebook(entries, denominator)


def _sample_groups(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return evenly spread groups, fp32 (n, 1, 32), and the mask or the importance of their columns (n, 1, 32)."""
    mask = _column_mask(weight.shape[1], importance)[0]
    n_groups = len(mask)
    stride = max(1, len(weight) * n_groups // CODEBOOK_SAMPLE_GROUPS)
    while math.gcd(stride, n_groups) > 1:  # otherwise only some columns would be sampled
        stride += 1
    sample = torch.arange(0, len(weight) * n_groups, stride)
    rows, group_in_row = sample // n_groups, sample % n_groups
    columns = group_in_row[:, None] * layout.TILE_COLUMNS + torch.arange(layout.TILE_COLUMNS)
    inside = columns < weight.shape[1]
    groups = weight[rows[:, None], columns.clamp_max(weight.shape[1] - 1)].float() * inside
    return (groups * 2.0 ** -magnitude_of(groups))[:, None], mask[group_in_row, None]


def _rounded_codebook(entries: Tensor, weights: Tensor) -> tuple[int, ...]:
    """Round entries to 16 different integers from -32 to 32 in about the same proportions, in ascending order.

    Scales are free, so the largest magnitude becomes the integer with the least squared error, weighted by entry.
    """
    factors = (torch.linspace(1, LEAST_FITTED, FITTED_TRIALS) * (FITTED_LIMIT / entries.abs().max()))[:, None]
    rounded = (entries * factors).round()
    trials = torch.cat([_apart(rounded), -_apart(-rounded.flip(-1)).flip(-1)])
    error = ((trials / factors.repeat(2, 1) - entries).square() * weights).sum(-1)
    return tuple(int(value) for value in trials[error.argmin()].tolist())


def _apart(values: Tensor) -> Tensor:
    """Make ascending integers (n, 16) distinct: move those equal to a previous one up, or down at the limit."""
    index = torch.arange(16)
    return (values - index).cummax(-1).values.clamp_max(FITTED_LIMIT - 15) + index


def padded_groups(weight: Tensor) -> Tensor:
    """Split the matrix (N, K) into groups of 32 columns: fp32 (N padded, K padded / 32, 32)."""
    n_rows, n_columns = layout.padded_shape(*weight.shape)
    if (n_rows, n_columns) == weight.shape:
        return weight.float().reshape(n_rows, -1, layout.TILE_COLUMNS)
    padded = torch.zeros(n_rows, n_columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(n_rows, -1, layout.TILE_COLUMNS)


def _column_mask(n_columns: int, importance: Tensor | None = None) -> Tensor:
    """Return the importance (K,) of the columns, 1 for None, and 0 for padding: fp32 (1, K padded / 32, 32)."""
    mask = torch.zeros(layout.padded_shape(1, n_columns)[1])
    mask[:n_columns] = 1 if importance is None else importance
    return mask.view(1, -1, layout.TILE_COLUMNS)
