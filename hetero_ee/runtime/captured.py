"""Captured hidden states: those before a few layers, which passes keep for drafting."""

from collections.abc import Iterable, Sequence
from itertools import pairwise


def captured_layers(layers: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Return the layers, checked to be ascending and among n_layers.

    Raises:
        ValueError: if they are not.
    """
    if list(layers) != sorted(set(layers)) or not all(0 <= layer < n_layers for layer in layers):
        raise ValueError(f"states before layers {list(layers)} can't be captured of a model with {n_layers}.")
    return tuple(layers)


def cut(layers: range, at: Iterable[int]) -> list[range]:
    """Return the layers in parts, split at each of `at` that is inside; no parts for no layers."""
    inside = sorted({layer for layer in at if layer in layers and layer > layers.start})
    bounds = [layers.start, *inside, layers.stop]
    return [range(first, end) for first, end in pairwise(bounds)] if layers else []
