"""Layers before which passes keep ("capture") hidden states, since drafting needs them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise


def captured_layers(layers: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Check that the layers ascend and exist in a model with n_layers, and return them.

    Raises:
        ValueError: if they don't.
    """
    if list(layers) != sorted(set(layers)) or not all(0 <= layer < n_layers for layer in layers):
        raise ValueError(f"states before layers {list(layers)} can't be captured of a model with {n_layers}.")
    return tuple(layers)


def cut(layers: range, at: Iterable[int]) -> list[range]:
    """Split a range of layers before each of the layers `at` that are inside it."""
    inside = sorted({layer for layer in at if layer in layers and layer > layers.start})
    bounds = [layers.start, *inside, layers.stop]
    return [range(first, end) for first, end in pairwise(bounds)] if layers else []
