"""Cut weights to the first neurons of some FFNs, for a device that computes only these; no bytes are copied."""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from hetero_ee.models.blocks import Block, least_activations
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.tiles import TILE_ROWS
from hetero_ee.weights.weight import TileWeight, Weight

BY_NEURON = ("gate", "up", "down")  # cut by rows, as are their biases except down's


def with_first_neurons(weights: ModelWeights, counts: Iterable[tuple[Block, int]]) -> ModelWeights:
    """Keep only the first n neurons (a multiple of 16) of each sparse FFN in `counts`. Predictors stay whole."""
    matrices: dict[str, Weight] = {}
    vectors: dict[str, Tensor] = {}
    for block, n in counts:
        names = {short: tensor.name for short, tensor in block.tensors.items() if short in BY_NEURON}
        matrices |= {name: _first(weights.matrices[name], n) for name in names.values()}
        biases = [f"{name}_bias" for short, name in names.items() if short != "down"]
        cut = {name for name in (*biases, least_activations(block)) if name in weights.vectors}
        vectors |= {name: weights.vectors[name][:n] for name in cut}
    return replace(weights, matrices=weights.matrices | matrices, vectors=weights.vectors | vectors)


def _first(weight: Weight, n: int) -> Weight:
    if isinstance(weight, RowWeight):
        return replace(weight, codes=weight.codes[:n], scales=weight.scales[:n])
    assert isinstance(weight, TileWeight) and not n % TILE_ROWS, "whole tiles"
    n_down = n // TILE_ROWS
    return replace(weight, tiles=weight.tiles[:n_down], scales=weight.scales[:n_down], n_rows=n)
