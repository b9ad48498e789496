"""Which layers a cache holds, and how many tokens of each sequence have passed each of them."""

from collections.abc import Mapping, Sequence

from hetero_ee.runtime.rows import Rows


class HeldLayers:
    """The ascending numbers of some of a model's layers; a cache keeps them side by side under 0, 1, 2, ...

    Raises ValueError where they don't ascend.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        if list(self._layers) != sorted(set(self._layers)):
            raise ValueError(f"layers {self._layers} must ascend.")
        self._places = {layer: place for place, layer in enumerate(self._layers)}

    def __len__(self) -> int:
        return len(self._layers)

    def place(self, layer: int) -> int:
        """Under which number the layer is kept. Raises KeyError for one that is not."""
        return self._places[layer]

    def places(self, layers: range | None) -> slice:
        """The same for consecutive layers of the model, of which some may be held; None for all."""
        if layers is None:
            return slice(0, len(self._layers))
        found = [place for layer, place in self._places.items() if layer in layers]
        return slice(found[0], found[-1] + 1) if found else slice(0, 0)


def lengths_with(rows: Rows, lengths: Mapping[int, Sequence[int]], places: slice, max_tokens: int) -> dict[int, int]:
    """How many tokens these layers hold of each of the rows' sequences with the rows. lengths: of open sequences.

    Raises ValueError unless each row follows the last token that every one of the layers holds of its sequence.
    """
    before: dict[int, int] = {}
    for sequence, held in lengths.items():
        mine = held[places]
        before[sequence] = mine[0]
        if mine.count(mine[0]) != len(mine) and sequence in rows.sequences:
            raise ValueError(f"sequence {sequence} holds {min(mine)} tokens in one layer and {max(mine)} in another.")
    return rows.lengths_after(before, max_tokens)
