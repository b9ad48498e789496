"""Represent the engine's matrices: dense fp32, or tiles of int4 codes or int8 values with their scales."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hetero_ee.weights import tiles as layout

LINEAR_CODEBOOK = tuple(range(-8, 8))


class Weight(Protocol):
    """An immutable matrix W (N, K) in one of several representations."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def n_bytes(self) -> int: ...

    def dequantize(self) -> Tensor:
        """Return the matrix as fp32 (N, K)."""
        ...

    def rows(self, indices: Tensor) -> Tensor:
        """Return W[indices], fp32 (len(indices), K), bit-equal to the same rows of dequantize()."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A matrix in fp32, not quantized."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def n_bytes(self) -> int:
        return self.values.nbytes

    def dequantize(self) -> Tensor:
        return self.values

    def rows(self, indices: Tensor) -> Tensor:
        return self.values[indices]


@dataclass(frozen=True, slots=True, eq=False)
class TileWeight:
    """A matrix in tiles: W[n, k] = 2^exponent x scales[n, k // 32] x entry[n, k], see docs/FORMAT.md for each layout.

    Args:
        tiles: codes, uint8 (N/16, K/32, 256, 320 or 384), or int8 entries (N/16, K/32, 512). N and K are padded.
        scales: fp16 (N/16, K/32, 16 or 32). The second 16 are zero points, which are subtracted from the entries, or in
            6-bit tiles the scales of columns 16 to 31.
        codebook: the entries of 16 codes, int8, ascending. None for int8 tiles, and for 5- and 6-bit codes, whose
            entries are -16 .. 15 and -32 .. 31. Zero points need LINEAR_CODEBOOK or 5-bit codes.
        n_rows, n_columns: the matrix's shape without padding.
        n_terms: int8 terms into which kernels split each activation that this matrix multiplies, 1 or 2.
    """

    tiles: Tensor
    scales: Tensor
    exponent: int
    codebook: tuple[int, ...] | None
    n_rows: int
    n_columns: int
    n_terms: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_rows, self.n_columns

    @property
    def layout(self) -> str:
        """Name of the layout, a key of tiles.TILE_BYTES."""
        return layout.layout_of(self.tiles, self.scales)

    @property
    def n_bytes(self) -> int:
        return self.tiles.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        values = self._expand(layout.unpack(self.tiles), layout.scales_of_rows(self.scales))
        return values[: self.n_rows, : self.n_columns]

    def rows(self, indices: Tensor) -> Tensor:
        codes = layout.unpack_rows(layout.lines_of_rows(self.tiles, indices))
        return self._expand(codes, layout.scales_of_rows(self.scales, indices))[:, : self.n_columns]

    def gathered(self, indices: Tensor) -> "TileWeight":
        """Return the rows W[indices] as a matrix with the same codes and scales, without rounding them again."""
        n_padded = layout.padded_shape(len(indices), self.n_columns)[0] - len(indices)
        codes, scales = layout.unpack(self.tiles)[indices], layout.scales_of_rows(self.scales)[indices]
        tiles = layout.pack(torch.nn.functional.pad(codes, (0, 0, 0, n_padded)), self.layout)
        packed = layout.pack_numbers(torch.nn.functional.pad(scales, (0, 0, 0, 0, 0, n_padded)))
        return replace(self, tiles=tiles, scales=packed, n_rows=len(indices))

    def _expand(self, codes: Tensor, numbers: Tensor) -> Tensor:
        """Dequantize codes (n, K) with fp16 scales and zero points (n, K/32, 1 or 2) to fp32, including padding."""
        entries, scales = codes.float(), numbers.float()
        if self.codebook is not None:
            entries = torch.tensor(self.codebook, dtype=torch.float32)[codes.int()]
        if self.layout in layout.ENTRY_OFFSETS:
            entries -= layout.ENTRY_OFFSETS[self.layout]
        if self.layout in (layout.ZEROS, layout.ZEROS_5):
            entries, scales = entries.view(*scales.shape[:2], -1) - scales[..., 1:], scales[..., :1]
        entries = entries.view(*scales.shape, -1)  # the columns of each scale
        return (entries * (scales * 2.0**self.exponent)[..., None]).flatten(1)
