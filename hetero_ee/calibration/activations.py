"""Activation statistics of a model: second moments of the matrices' inputs, and how often FFN neurons are active.

The moments tell which columns' quantization errors matter; the frequencies are for sparsity. They are measured on the
reference operations, which see every matrix with its input.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hetero_ee.calibration.traces import FIRST_COUNTED
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.speculation.exits.calibration import FREQUENCY
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import Weight

ACTIVE_SHARE = 0.05  # of a token's largest activation in a layer; smaller ones count as inactive
MOMENT = "second_moment"

Sums = dict[str, npt.NDArray[np.float64]]


class ActivationRecorder(BatchedTorchOps):
    """Operations that sum up, in float64, the inputs of the layers' matrices.

    Run one whole chunk per pass: the first token, at position 0, is left out. `sums` and `n_tokens` grow with every
    pass.

    `sums` has, by name, "<matrix>.second_moment": the sums of squares of each input feature, and
    "layers.*.ffn.active_share": the number of tokens at which a neuron was active (above 0 for ReLU, else above
    ACTIVE_SHARE of the token's largest activation).
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        self._spec = spec
        self._names: dict[int, str] = {}
        for block in _watched(spec):
            if block.layer is not None:
                for tensor in block.tensors.values():
                    if tensor.name in weights.matrices:
                        self._names[id(weights.matrices[tensor.name])] = tensor.name
        self.sums: Sums = {}
        self.n_tokens = 0

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        self._count(x, weight)
        return super().product(x, weight, bias)

    def summed(self, inner: Tensor, down: Weight) -> Tensor:
        self._count(inner, down)
        return super().summed(inner, down)

    def _count(self, x: Tensor, weight: Weight) -> None:
        name = self._names.get(id(weight))
        if name is not None:
            counted = x[FIRST_COUNTED:]
            self._add(f"{name}.{MOMENT}", counted.double().square().sum(0))
            if name.endswith(".ffn.down"):
                self._add(f"{name.removesuffix('.down')}.{FREQUENCY}", self._active(counted).double().sum(0))
            if name == "layers.0.attention.qkv":
                self.n_tokens += len(counted)

    def _active(self, inner: Tensor) -> Tensor:
        """Return which inputs of the second FFN matrix count as active, (m, ffn)."""
        if self._spec.activation in ("relu", "fatrelu"):
            return inner != 0 if self._spec.gated else inner > 0
        size = inner.abs()
        return size > ACTIVE_SHARE * size.amax(dim=1, keepdim=True)

    def _add(self, name: str, values: Tensor) -> None:
        array = values.numpy()
        self.sums[name] = self.sums[name] + array if name in self.sums else array


def activation_names(spec: ModelSpec) -> dict[str, int]:
    """Return the names that an ActivationRecorder sums under, with their numbers of features."""
    sizes: dict[str, int] = {}
    for block in _watched(spec):
        for short, tensor in block.tensors.items():
            if block.layer is not None and len(tensor.shape) == 2:
                n_features = spec.ffn_size if short == "down" else tensor.shape[1]
                sizes[f"{tensor.name}.{MOMENT}"] = n_features
                if short == "down":
                    sizes[f"{tensor.name.removesuffix('.down')}.{FREQUENCY}"] = n_features
    return sizes


def _watched(spec: ModelSpec) -> list[Block]:
    """Return the blocks without predictors of active neurons, which are not part of the store."""
    return decoder_blocks(replace(spec, predictor_rank=0))
