"""Which layers a cache holds, and how many tokens of each sequence have passed each of them."""

from collections.abc import Mapping, Sequence

from hetero_ee.runtime.batch import Batch


class HeldLayers:
    """The ascending numbers of some of a model's layers; a cache keeps them side by side under 0, 1, 2, ...

    layers: the first n_layers where None. Raises ValueError where they don't ascend or aren't n_layers.
    """

    def __init__(self, n_layers: int, layers: Sequence[int] | None = None) -> None:
        self.layers = tuple(range(n_layers) if layers is None else layers)
        if len(self.layers) != n_layers:
            raise ValueError(f"a cache of {n_layers} layers can't hold {len(self.layers)}.")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {self.layers} must ascend.")
        self._places = {layer: place for place, layer in enumerate(self.layers)}

    def place(self, layer: int) -> int:
        """Under which number the layer is kept. Raises KeyError for one that is not."""
        return self._places[layer]

    def places(self, layers: range | None) -> slice:
        """The same for consecutive layers of the model, of which some may be held; None for all.

        Raises ValueError where they don't follow each other.
        """
        if layers is None:
            return slice(0, len(self.layers))
        if layers.step != 1:
            raise ValueError(f"{layers} are not layers that follow each other.")
        found = [place for layer, place in self._places.items() if layer in layers]
        return slice(found[0], found[-1] + 1) if found else slice(0, 0)


def lengths_with(batch: Batch, lengths: Mapping[int, Sequence[int]], places: slice, max_tokens: int) -> dict[int, int]:
    """How many tokens these layers hold of each of the rows' sequences with the rows. lengths: of open sequences.

    Raises ValueError unless each row follows the last token that every one of the layers holds of its sequence, and has
    passed the layer before them.
    """
    before: dict[int, int] = {}
    for sequence in lengths.keys() & set(batch.sequences):
        mine = lengths[sequence][places]
        before[sequence] = mine[0]
        if mine.count(mine[0]) != len(mine):
            raise ValueError(f"sequence {sequence} holds {min(mine)} tokens in one layer and {max(mine)} in another.")
    after = batch.lengths_after(before, max_tokens)
    for sequence, length in after.items():
        if places.start and lengths[sequence][places.start - 1] < length:
            n_passed = lengths[sequence][places.start - 1]
            raise ValueError(f"{n_passed} tokens of sequence {sequence} have passed the layer before, not {length}.")
    return after
