"""Which neurons of an FFN a token does without: those whose score is below their layer's threshold.

A neuron's score is |activation| x norm of its row of down: at most so much does it add to the sum for each unit of up
(CATS, arXiv 2404.08763, with the norm of WINA, arXiv 2505.19427). A neuron whose activation is 0 is never summed, so a
threshold of 0 leaves out what changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.models.blocks import Block, BlockKind, decoder_blocks, least_activations
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.model_weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Thresholds:
    """per_layer: fp32. target: the share of neurons, over all layers, that they were chosen to leave out."""

    target: float
    per_layer: tuple[float, ...]

    def least(self, spec: ModelSpec, weights: ModelWeights) -> dict[str, Tensor]:
        """The same as the least |activation| of each neuron, fp32 (ffn,), by `least_activations` of its block: what
        executors look for among a model's vectors. Below it a neuron is left out."""
        smallest = torch.finfo(torch.float32).tiny
        return {
            least_activations(block): threshold / down_norms(block, weights).clamp(min=smallest)
            for block, threshold in zip(neuron_blocks(spec), self.per_layer, strict=True)
        }


def neuron_blocks(spec: ModelSpec) -> list[Block]:
    """The FFNs, in order of their layers."""
    return [block for block in decoder_blocks(spec) if block.kind is BlockKind.FFN]


def down_norms(block: Block, weights: ModelWeights) -> Tensor:
    """L2 norms of a neuron-major FFN's rows of down, fp32 (ffn,)."""
    norms: Tensor = torch.linalg.vector_norm(weights.matrices[block.tensors["down"].name].dequantize(), dim=1)
    return norms
