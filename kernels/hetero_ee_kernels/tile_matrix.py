"""A GPU matrix in tiles (docs/FORMAT.md), checked once and ready for the kernels."""

from copy import copy
from typing import Any

import torch

# The kernels' KIND of tile: int4 of -8 .. 7, int4 with a codebook, int8, int4 of -8 .. 7 with zero points.
LINEAR, CODEBOOK, BYTES, ZEROS = 0, 1, 2, 3
# The kernels' ISA, the instructions that a kernel may use: only portable ones, AMD's, NVIDIA's (Turing: smaller mma).
PLAIN, GCN, TURING, PTX = 0, 1, 2, 3
GROUP = 32
LINEAR_CODEBOOK = tuple(range(-8, 8))


class TileMatrix:
    """A matrix in tiles. It neither copies nor changes the tensors.

    Args:
        tiles: uint8 (N/16, G, 256) with a codebook, int8 (N/16, G, 512) without.
        scales: fp16 (N/16, G, 16), or (N/16, G, 32) with the codebook -8 .. 7, the last 16 being zero points.
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
        n_bytes, dtype = (512, torch.int8) if codebook is None else (256, torch.uint8)
        if tiles.dim() != 3 or tiles.shape[2] != n_bytes or tiles.dtype != dtype:
            raise ValueError(f"Tiles are {tiles.dtype} {tuple(tiles.shape)}, expected {dtype} (N/16, G, {n_bytes}).")
        is_linear = codebook is not None and tuple(codebook) == LINEAR_CODEBOOK
        has_zeros = is_linear and scales.shape[2:] == (32,)
        expected = (*tiles.shape[:2], 32 if has_zeros else 16)
        if tuple(scales.shape) != expected or scales.dtype != torch.float16 or scales.device != tiles.device:
            raise ValueError(f"Scales are {scales.dtype} {tuple(scales.shape)}, expected torch.float16 {expected}.")
        if any(not part.is_contiguous() or part.data_ptr() % 16 for part in (tiles, scales)):
            raise ValueError("Tiles and scales must be contiguous and aligned to 16 bytes.")
        self.n_blocks, self.n_groups = tiles.shape[:2]
        self.n_rows = 16 * self.n_blocks if n_rows is None else n_rows
        if not 16 * (self.n_blocks - 1) < self.n_rows <= 16 * self.n_blocks or not self.n_groups:
            raise ValueError(f"{n_rows} rows do not fit tiles of {tuple(tiles.shape)}.")
        self.kind = ZEROS if has_zeros else LINEAR if is_linear else BYTES if codebook is None else CODEBOOK
        self.tiles, self.scales, self.codebook = tiles, scales, codebook
        self.words, self.n_terms = tiles.view(torch.int32), n_terms
        self.factor = 2.0**exponent
        self.quantized_factor = self.factor / 16 if is_linear else self.factor  # see tile_group.py
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


def check_no_zeros(weight: TileMatrix) -> None:
    """Raise ValueError if the weight has zero points, which embeddings and heads never have."""
    if weight.kind == ZEROS:
        raise ValueError("Tiles with zero points are only supported by the whole matrix product.")


def output(out: Any, shape: tuple[int, ...], device: Any) -> Any:
    """Check that `out` is contiguous fp32 of this shape, or allocate it if it is None; return it."""
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=device)
    if tuple(out.shape) != shape or out.dtype != torch.float32 or not out.is_contiguous() or out.device != device:
        raise ValueError(f"Output is {out.dtype} {tuple(out.shape)}, expected contiguous torch.float32 {shape}.")
    return out


def instructions(tensor: Any) -> int:
    """Return the ISA constant for kernels on this tensor; PLAIN for Triton's interpreter."""
    if not tensor.is_cuda:
        return PLAIN
    if torch.version.hip is not None:
        return GCN
    return TURING if torch.cuda.get_device_capability(tensor.device) < (8, 0) else PTX
