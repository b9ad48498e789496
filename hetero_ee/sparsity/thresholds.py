"""Thresholds below which a token leaves neurons of an FFN out.

A neuron's score is |activation| x norm of its row of down: the most that it adds to the sum per unit of up (CATS, arXiv
2404.08763, with the norm of WINA, arXiv 2505.19427). A neuron whose activation is 0 is never summed, so that a
threshold of 0 leaves out only what changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.models.blocks import Block, least_activations, neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.model_weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds per layer, fp32. target: the share of all neurons that they should leave out."""

    target: float
    per_layer: tuple[float, ...]

    def least(self, spec: ModelSpec, weights: ModelWeights) -> dict[str, Tensor]:
        """Return the thresholds as the least |activation| of each neuron, fp32 (ffn,), below which it is left out.

        The names are those that executors look up in a model's vectors, `least_activations` of each block.
        """
        smallest = torch.finfo(torch.float32).tiny
        return {
            least_activations(block): threshold / down_norms(block, weights).clamp(min=smallest)
            for block, threshold in zip(neuron_blocks(spec), self.per_layer, strict=True)
        }


def down_norms(block: Block, weights: ModelWeights) -> Tensor:
    """Return the L2 norms of the rows of down of a neuron-major FFN, fp32 (ffn,)."""
    norms: Tensor = torch.linalg.vector_norm(weights.matrices[block.tensors["down"].name].dequantize(), dim=1)
    return norms
