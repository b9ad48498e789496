"""bitsandbytes' 4-bit codes: how they are packed, and their table of 16 values as a codebook of ours."""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_ENTRIES = range(64, 128)  # what the value of largest magnitude may become


@dataclass(frozen=True, slots=True, eq=False)
class TableCodebook:
    """table[c] is about unit x entries[codes[c]]. entries: 16 int8 values, ascending. codes: uint8 (16,)."""

    entries: tuple[int, ...]
    codes: Tensor
    unit: float

    @property
    def zero_code(self) -> int:
        """The code nearest to zero, for padding."""
        return min(range(16), key=lambda code: abs(self.entries[code]))


def table_codebook(table: Tensor) -> TableCodebook | None:
    """table: 16 values, not all of them 0. None where two that differ would round to one.

    The largest magnitude becomes the whole number that leaves the least squared error: 112 for NF4 and 120 for FP4,
    with two thirds and a third of the error that 127 would leave. Values that are there twice (FP4 has a negative zero)
    share a code; entries that no code means fill the codebook up.
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
    """Bytes, uint8 (b,) -> codes, uint8 (2b,): the first of two lies in the high four bits."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).flatten()
