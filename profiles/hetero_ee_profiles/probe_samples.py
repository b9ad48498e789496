"""Shapes that probes measure, and samples that they return."""

from collections.abc import Callable
from dataclasses import dataclass

INT4_TILE_BYTES, INT8_TILE_BYTES, TILE_ROWS, TILE_COLUMNS = 256, 512, 16, 32
MAX_CACHE_LAYERS = 8  # layers whose keys and values attention reads alternately

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Shape of a matrix product in a pass: y[m, n_rows] = x[m, n_columns] W^T."""

    layout: str  # "int4" or "int8"
    n_rows: int
    n_columns: int
    n_layers: int  # layers that have it

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.n_rows // TILE_ROWS), -(-self.n_columns // TILE_COLUMNS)

    @property
    def tile_bytes(self) -> int:
        return INT4_TILE_BYTES if self.layout == "int4" else INT8_TILE_BYTES

    @property
    def n_bytes(self) -> int:
        """Bytes of one matrix of this shape, including scales."""
        return self.grid[0] * self.grid[1] * (self.tile_bytes + 2 * TILE_ROWS)


@dataclass(frozen=True, slots=True)
class ProductSamples:
    """Measured seconds of one matrix product with m rows."""

    shape: ProductShape
    m: int
    cycle_bytes: int  # of all matrices that were multiplied alternately
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AttentionSamples:
    """Measured seconds of one layer's attention for m tokens."""

    m: int
    context_tokens: int
    seconds: tuple[float, ...]
