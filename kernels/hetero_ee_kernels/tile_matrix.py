"""A matrix in tiles on the GPU, checked once, ready for the kernels (docs/FORMAT.md)."""

from typing import Any

import torch

# The kernels' KIND of tile: int4 of -8 .. 7, int4 of a codebook, int8, int4 of -8 .. 7 with zero points.
LINEAR, CODEBOOK, BYTES, ZEROS = 0, 1, 2, 3
# The kernels' ISA, whose instructions one may hold: nobody's, AMD's, NVIDIA's. Of tensor cores Turing has smaller ones.
PLAIN, GCN, TURING, PTX = 0, 1, 2, 3
GROUP = 32
LINEAR_CODEBOOK = tuple(range(-8, 8))


class TileMatrix:
    """Keeps the tensors as they are; changes and copies nothing.

    tiles: uint8 (N/16, G, 256) with a codebook, int8 (N/16, G, 512) without; scales: fp16 (N/16, G, 16), of -8 .. 7
    also (N/16, G, 32), the last 16 zero points; codebook: 16 integers of -128..127; n_rows: how many of the padded rows
    count, all where None.
    Raises ValueError for other shapes, types, devices or layouts. Both tensors must lie at multiples of 16 bytes.
    """

    def __init__(
        self, tiles: Any, scales: Any, exponent: int, codebook: tuple[int, ...] | None, n_rows: int | None = None
    ) -> None:
        n_bytes, dtype = (512, torch.int8) if codebook is None else (256, torch.uint8)
        if tiles.dim() != 3 or tiles.shape[2] != n_bytes or tiles.dtype != dtype:
            raise ValueError(f"tiles are {tiles.dtype} {tuple(tiles.shape)}, expected {dtype} (N/16, G, {n_bytes}).")
        is_linear = codebook is not None and tuple(codebook) == LINEAR_CODEBOOK
        has_zeros = is_linear and scales.shape[2:] == (32,)
        expected = (*tiles.shape[:2], 32 if has_zeros else 16)
        if tuple(scales.shape) != expected or scales.dtype != torch.float16 or scales.device != tiles.device:
            raise ValueError(f"scales are {scales.dtype} {tuple(scales.shape)}, expected torch.float16 {expected}.")
        if any(not part.is_contiguous() or part.data_ptr() % 16 for part in (tiles, scales)):
            raise ValueError("tiles and scales must be contiguous and begin at multiples of 16 bytes.")
        self.n_blocks, self.n_groups = tiles.shape[:2]
        self.n_rows = 16 * self.n_blocks if n_rows is None else n_rows
        if not 16 * (self.n_blocks - 1) < self.n_rows <= 16 * self.n_blocks or not self.n_groups:
            raise ValueError(f"{n_rows} rows don't fit tiles {tuple(tiles.shape)}.")
        self.kind = ZEROS if has_zeros else LINEAR if is_linear else BYTES if codebook is None else CODEBOOK
        self.tiles, self.scales, self.codebook = tiles, scales, codebook
        self.words = tiles.view(torch.int32)
        self.factor = 2.0**exponent
        self.quantized_factor = self.factor / 16 if is_linear else self.factor  # see tile_group.py
        entries = torch.tensor(codebook or (0,) * 16, dtype=torch.int8)
        self.table = entries.view(torch.int32).to(tiles.device)
        self.isa = instructions(tiles)
        self.n_bytes = tiles.nbytes + scales.nbytes


def check_rows(x: Any, weight: TileMatrix) -> None:
    """Raises ValueError unless x is contiguous fp32 or fp16 (m, K) on the weight's device, K in its groups."""
    fits = x.dim() == 2 and x.dtype in (torch.float32, torch.float16)
    fits = fits and x.is_contiguous() and x.device == weight.tiles.device
    if not fits or -(-x.shape[1] // GROUP) != weight.n_groups:
        raise ValueError(
            f"activations are {x.dtype} {tuple(x.shape)} on {x.device}, expected contiguous torch.float32 (m, K) "
            f"on {weight.tiles.device}, K in {weight.n_groups} groups of 32."
        )


def check_no_zeros(weight: TileMatrix) -> None:
    """Raises ValueError for one with zero points, which embeddings and heads never have."""
    if weight.kind == ZEROS:
        raise ValueError("tiles have zero points, which only the whole product takes.")


def output(out: Any, shape: tuple[int, ...], device: Any) -> Any:
    """`out` where it is a contiguous fp32 of that shape, fresh memory where it is None; else raises ValueError."""
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=device)
    if tuple(out.shape) != shape or out.dtype != torch.float32 or not out.is_contiguous() or out.device != device:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, expected contiguous torch.float32 {shape}.")
    return out


def instructions(tensor: Any) -> int:
    """Whose instructions kernels on this tensor may hold: the interpreter knows none."""
    if not tensor.is_cuda:
        return PLAIN
    if torch.version.hip is not None:
        return GCN
    return TURING if torch.cuda.get_device_capability(tensor.device) < (8, 0) else PTX
