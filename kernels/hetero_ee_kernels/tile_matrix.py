"""A GPU matrix in tiles (docs/FORMAT.md), checked once and ready for the kernels."""

from copy import copy
from typing import Any

import torch

from hetero_ee_kernels.checks import check

# The kernels' KIND of tile: int4 of -8 .. 7, int4 with a codebook, int8, int4 of -8 .. 7 with zero points, 5 bits, the
# same with zero points, 6 bits with a scale for each half of the columns.
LINEAR, CODEBOOK, BYTES, ZEROS, FIVE, FIVE_ZEROS, SIX = range(7)
# By a tile's bytes and its scales and zero points; CODEBOOK is as LINEAR.
KINDS = {(256, 16): LINEAR, (256, 32): ZEROS, (320, 16): FIVE, (320, 32): FIVE_ZEROS, (384, 32): SIX, (512, 16): BYTES}
# Factor by which the kernels' entries are too large, since they are unpacked to the top bits of a byte.
ENTRY_FACTORS = {LINEAR: 16, ZEROS: 16, FIVE: 8, FIVE_ZEROS: 8, SIX: 4}
# The kernels' ISA, the instructions that a kernel may use: only portable ones, AMD's, NVIDIA's (Turing: smaller mma).
PLAIN, GCN, TURING, PTX = 0, 1, 2, 3
GROUP = 32
LINEAR_CODEBOOK = tuple(range(-8, 8))


class TileMatrix:
    """A matrix in tiles. It neither copies nor changes the tensors.

    Args:
        tiles: uint8 (N/16, G, 256) with a codebook; without, uint8 (N/16, G, 320 or 384) or int8 (N/16, G, 512).
        scales: fp16 (N/16, G, 16 or 32). The last 16 are zero points, for codebook -8 .. 7 and 320 bytes, or the scales
            of columns 16 .. 31, for 384 bytes.
        codebook: 16 integers of -128..127, or None.
        n_rows: number of rows without padding; None if all count.
        n_terms: int8 terms of each activation, 1 or 2; see quantize.py.

    Raises:
        ValueError: if a shape, dtype or device does not fit, or a tensor is not contiguous and aligned to 16 bytes.
    """

    def __init__(
        self,
        tiles: Any,
        scales: Any,
        exponent: int,
        codebook: tuple[int, ...] | None,
        n_rows: int | None = None,
        n_terms: int = 1,
    ) -> None:
        is_linear = codebook is not None and tuple(codebook) == LINEAR_CODEBOOK
        kind = KINDS.get((*tiles.shape[2:], *scales.shape[2:]))
        if kind == LINEAR and not is_linear:
            kind = CODEBOOK
        needs_codebook = kind in (LINEAR, CODEBOOK, ZEROS)
        if kind is None or (codebook is not None) != needs_codebook or (kind == ZEROS and not is_linear):
            raise ValueError(
                f"Tiles {tuple(tiles.shape)} and scales {tuple(scales.shape)} with codebook {codebook} fit no layout."
            )
        self.n_blocks, self.n_groups = tiles.shape[:2]
        check("tiles", tiles, tuple(tiles.shape), torch.int8 if kind == BYTES else torch.uint8)
        check("scales", scales, (self.n_blocks, self.n_groups, scales.shape[2]), torch.float16)
        self.n_rows = 16 * self.n_blocks if n_rows is None else n_rows
        if not 16 * (self.n_blocks - 1) < self.n_rows <= 16 * self.n_blocks or not self.n_groups:
            raise ValueError(f"{n_rows} rows do not fit tiles of {tuple(tiles.shape)}.")
        self.kind = kind
        self.tiles, self.scales, self.codebook = tiles, scales, codebook
        self.words, self.n_terms = tiles.view(torch.int32), n_terms
        self.factor = 2.0**exponent
        self.quantized_factor = self.factor / ENTRY_FACTORS.get(kind, 1)  # see tile_group.py
        entries = torch.tensor(codebook or (0,) * 16, dtype=torch.int8)
        self.table = entries.view(torch.int32).to(tiles.device)
        self.isa = instructions(tiles)
        self.n_bytes = tiles.nbytes + scales.nbytes

    def with_tiles(self, tiles: Any, scales: Any) -> "TileMatrix":
        """Return a matrix of other tiles in the same format, such as some of this one's. Copies nothing to the GPU."""
        found = copy(self)
        found.n_blocks, found.n_rows = len(tiles), 16 * len(tiles)
        found.tiles, found.scales, found.words = tiles, scales, tiles.view(torch.int32)
        found.n_bytes = tiles.nbytes + scales.nbytes
        return found


def check_rows(x: Any, weight: TileMatrix) -> None:
    """Check that x is contiguous fp32 or fp16 (m, K) on the weight's device. Raises: ValueError: if it isn't."""
    fits = x.dim() == 2 and x.dtype in (torch.float32, torch.float16)
    fits = fits and x.is_contiguous() and x.device == weight.tiles.device
    if not fits or -(-x.shape[1] // GROUP) != weight.n_groups:
        raise ValueError(
            f"Activations are {x.dtype} {tuple(x.shape)} on {x.device}, expected contiguous torch.float32 (m, K) "
            f"on {weight.tiles.device}, K in {weight.n_groups} groups of 32."
        )


def check_vocabulary(weight: TileMatrix) -> None:
    """Raise ValueError for kinds of tile that embeddings and heads never have: with zero points, or of 5 or 6 bits."""
    if weight.kind > BYTES:
        raise ValueError("Tiles with zero points or of 5 or 6 bits are only supported by the whole matrix product.")


def instructions(tensor: Any) -> int:
    """Return the ISA constant for kernels on this tensor; PLAIN for Triton's interpreter."""
    if not tensor.is_cuda:
        return PLAIN
    if torch.version.hip is not None:
        return GCN
    return TURING if torch.cuda.get_device_capability(tensor.device) < (8, 0) else PTX
