"""Cut weights to the first neurons or experts of some blocks, for a device that computes only these.

No bytes are copied.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from hetero_ee.layers.moe import MoeSpec
from hetero_ee.models.blocks import Block, least_activations
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.tiles import TILE_ROWS
from hetero_ee.weights.weight import TileWeight, Weight

BY_NEURON = ("gate", "up", "down")  # cut by rows, as are their biases except down's


def with_first_units(weights: ModelWeights, counts: Iterable[tuple[Block, int]]) -> ModelWeights:
    """Keep only the first n neurons (a multiple of 16) or experts of each block in `counts`.

    Predictors, routers and shared experts stay whole.
    """
    matrices: dict[str, Weight] = {}
    vectors: dict[str, Tensor] = {}
    for block, n in counts:
        matrix_rows, vector_rows = _kept_rows(block, n)
        matrices |= {name: _first(weights.matrices[name], n_rows) for name, n_rows in matrix_rows.items()}
        vectors |= {
            name: weights.vectors[name][:n_rows] for name, n_rows in vector_rows.items() if name in weights.vectors
        }
    return replace(weights, matrices=weights.matrices | matrices, vectors=weights.vectors | vectors)


def _kept_rows(block: Block, n: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the names of the block's matrices and vectors to cut, with the rows that n neurons or experts have."""
    names = {short: tensor.name for short, tensor in block.tensors.items()}
    if isinstance(block.mixer, MoeSpec):
        n_experts = block.mixer.router.n_experts
        rows = {short: n * block.tensors[short].shape[0] // n_experts for short in block.mixer.expert_matrices}
        biases = {f"{names[short]}_bias": n_rows for short, n_rows in rows.items()}
        return {names[short]: n_rows for short, n_rows in rows.items()}, biases
    by_neuron = [short for short in BY_NEURON if short in names]
    biases = {f"{names[short]}_bias": n for short in by_neuron if short != "down"}
    return {names[short]: n for short in by_neuron}, biases | {least_activations(block): n}


def _first(weight: Weight, n: int) -> Weight:
    if isinstance(weight, RowWeight):
        return replace(weight, codes=weight.codes[:n], scales=weight.scales[:n])
    assert isinstance(weight, TileWeight) and not n % TILE_ROWS, "whole tiles"
    n_down = n // TILE_ROWS
    return replace(weight, tiles=weight.tiles[:n_down], scales=weight.scales[:n_down], n_rows=n)
