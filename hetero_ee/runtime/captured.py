"""Hidden states that passes keep beside their results: those before up to some layers, for who drafts from them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise


def captured_layers(layers: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """The layers, checked: ascending, of a model with so many. Raises ValueError."""
    if list(layers) != sorted(set(layers)) or not all(0 <= layer < n_layers for layer in layers):
        raise ValueError(f"states before layers {list(layers)} can't be captured of a model with {n_layers}.")
    return tuple(layers)


def cut(layers: range, at: Iterable[int]) -> list[range]:
    """The layers in parts, a new one at each of `at` that is inside; none of no layers."""
    inside = sorted({layer for layer in at if layer in layers and layer > layers.start})
    bounds = [layers.start, *inside, layers.stop]
    return [range(first, end) for first, end in pairwise(bounds)] if layers else []
