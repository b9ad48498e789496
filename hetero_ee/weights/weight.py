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
    """A matrix in tiles: W[n, k] = 2^exponent x scales[n, k // 32] x entry[n, k].

    Args:
        tiles: 4-bit codes, uint8 (N/16, K/32, 256), or int8 entries (N/16, K/32, 512). N and K are padded.
        scales: fp16 (N/16, K/32, 16), or (N/16, K/32, 32) with zero points, which are subtracted from the entries and
            need LINEAR_CODEBOOK.
        codebook: the entries of the 16 codes, int8, ascending; None for int8 tiles.
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
        if self.codebook is None:
            return "int8"
        return layout.ZEROS if self.scales.shape[-1] > layout.TILE_ROWS else "int4"

    @property
    def n_bytes(self) -> int:
        return self.tiles.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        codes = layout.unpack_int8(self.tiles) if self.codebook is None else layout.unpack_int4(self.tiles)
        values = self._expand(codes, layout.unpack_scales(self.scales), layout.unpack_zeros(self.scales))
        return values[: self.n_rows, : self.n_columns]

    def rows(self, indices: Tensor) -> Tensor:
        lines = layout.lines_of_rows(self.tiles, indices)
        codes = lines.flatten(1) if self.codebook is None else layout.unpack_nibbles(lines)
        return self._expand(codes, *layout.scales_of_rows(self.scales, indices))[:, : self.n_columns]

    def gathered(self, indices: Tensor) -> "TileWeight":
        """Return the rows W[indices] as a matrix with the same codes and scales, without rounding them again."""
        n_padded = layout.padded_shape(len(indices), self.n_columns)[0] - len(indices)
        unpacked = layout.unpack_int8(self.tiles) if self.codebook is None else layout.unpack_int4(self.tiles)
        zeros = layout.unpack_zeros(self.scales)
        parts = [unpacked, layout.unpack_scales(self.scales), *([] if zeros is None else [zeros])]
        codes, *scales = (torch.nn.functional.pad(values[indices], (0, 0, 0, n_padded)) for values in parts)
        tiles = layout.pack_int8(codes) if self.codebook is None else layout.pack_int4(codes)
        return replace(self, tiles=tiles, scales=layout.pack_scales(*scales), n_rows=len(indices))

    def _expand(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Dequantize codes (n, K) with fp16 scales and zero points (n, K/32) to fp32, including padding."""
        entries = codes.float()
        if self.codebook is not None:
            entries = torch.tensor(self.codebook, dtype=torch.float32)[codes.int()]
        entries = entries.view(*scales.shape, layout.TILE_COLUMNS)
        if zeros is not None:
            entries = entries - zeros.float()[:, :, None]
        return (entries * (scales.float() * 2.0**self.exponent)[:, :, None]).flatten(1)
