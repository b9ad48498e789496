"""States of one sequence's verified tokens, on the device that computed them."""

import torch
from torch import Tensor

PIECE_ROWS = 256  # memory comes in such pieces, so that growing copies nothing


class StateRows:
    """Rows (hidden,) by number, fp32."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    @torch.inference_mode()
    def put(self, first: int, rows: Tensor) -> None:
        """Write rows (m, hidden) from row `first` on, at most the number of rows, replacing existing ones."""
        while rows.shape[0] and len(self._pieces) * PIECE_ROWS < first + len(rows):
            self._pieces.append(rows.new_empty(PIECE_ROWS, rows.shape[1]))
        for piece, inside, taken in self._places(first, first + len(rows)):
            piece[inside] = rows[taken]

    @torch.inference_mode()
    def rows(self, first: int, end: int) -> Tensor:
        """Return (end - first, hidden). The rows must exist."""
        found = [piece[inside] for piece, inside, _ in self._places(first, end)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _places(self, first: int, end: int) -> list[tuple[Tensor, slice, slice]]:
        """Yield, for each piece with some of these rows, the piece and their positions in it and among all."""
        found = []
        for number in range(first // PIECE_ROWS, -(-end // PIECE_ROWS)):
            start = number * PIECE_ROWS
            low, high = max(first, start), min(end, start + PIECE_ROWS)
            found.append((self._pieces[number], slice(low - start, high - start), slice(low - first, high - first)))
        return found
