"""Fits a predictor of active neurons layer by layer, and measures how it changes the model's output."""

from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.calibration.stages import TRAIN, Chunk, first_numbers
from hetero_ee.calibration.steps import OF, KeptSteps
from hetero_ee.config import Progress
from hetero_ee.errors import ModelError
from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.kv.devices import host_cache
from hetero_ee.models.blocks import first_matrix, neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.sparsity.factors import Factors, FactorTraining, fit_factors, rank_of
from hetero_ee.sparsity.held_out import HeldOut
from hetero_ee.sparsity.predictor import (
    LayerPredictor,
    NeuronPredictor,
    PredictorMeasurement,
    layer_arrays,
    least_within,
    parsed_layer,
)
from hetero_ee.weights.model_weights import ModelWeights, expanded
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, quantize
from hetero_ee.weights.store.record import Arrays, RecordArrays
from hetero_ee.weights.weight import Weight

FITTED_TOKENS = 8192  # twice the hidden size of a 7B model, which the moments of its inputs need
MEASURED_TOKENS = 1024
FITTING = "Fitting the predictor"
STATES = "states"  # states after a layer, from which the next layer's fit starts


class PredictorFit:
    """Fits a predictor for a model whose FFNs are in rows, on the chunks of TRAIN, and measures it on HELD_OUT.

    Memory holds one layer's inputs and weights in addition to the model. A chunk's first tokens use all neurons and are
    not counted.

    Args:
        kept: Stores every layer and measurement, for one combination of model, chunks and training.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        chunks: Sequence[Chunk],
        training: FactorTraining | None = None,
        n_tokens: int = FITTED_TOKENS,
        progress: Progress | None = None,
        kept: KeptSteps | None = None,
    ) -> None:
        self._spec, self._weights, self._progress = spec, weights, progress
        self._training, self._kept = training or FactorTraining(), kept or KeptSteps()
        self._fitted = [chunks[number] for number in first_numbers(chunks, TRAIN, n_tokens)]
        self._held_out = HeldOut(spec, weights, chunks, MEASURED_TOKENS, progress)
        self._rank = rank_of(spec.hidden_size)

    def predictor(self) -> NeuronPredictor:
        """Fit the predictor and measure margins near the bound. Raises: ModelError: if inputs are not finite."""
        layers, states = [], None
        for layer in range(self._spec.n_layers):
            if self._progress:
                self._progress(FITTING, layer, self._spec.n_layers)
            make = partial(self._layer, layer, states)
            found = self._kept.once(f"layer {layer}", make, forgets=f"layer {layer - 1}{OF}{STATES}")
            states = found.get(STATES)
            layers.append(parsed_layer(RecordArrays(found), "", self._spec, self._rank))
        fitted = NeuronPredictor(tuple(layers), ())
        return replace(fitted, measured=tuple(least_within(partial(self._kept_measurement, fitted))))

    def measure(self, predictor: NeuronPredictor, margin: float) -> PredictorMeasurement:
        """Measure the predictor on held-out chunks. The inputs of each layer include the errors of earlier layers."""
        spec = replace(self._spec, predictor_rank=predictor.rank)
        counter = ActiveNeurons(spec, self._weights)
        kl_nats, neurons = self._held_out.divergence(spec, predictor.merged(spec, self._weights, margin), counter)
        used, predicted = neurons.since(NeuronCounts()) or (0.0, 0.0)
        active = counter.n_active / max(1, neurons.n_neurons)
        return PredictorMeasurement(margin, used / active if active else 1.0, predicted, active, kl_nats)

    def _kept_measurement(self, predictor: NeuronPredictor, margin: float) -> PredictorMeasurement:
        def measured() -> Arrays:
            return {"": np.array(astuple(self.measure(predictor, margin)))}

        return PredictorMeasurement(*self._kept.once(f"measured {margin}", measured)[""].tolist())

    def _layer(self, layer: int, before: NDArray[np.float32] | None) -> Arrays:
        """Fit one layer and return its arrays and the states (tokens, hidden) after it.

        Args:
            before: States before the layer, None for the first.
        """
        inputs = FfnInputs()
        states = self._through(layer, self._embedded() if before is None else torch.from_numpy(before), inputs)
        factors = self._factors(layer, torch.cat(inputs.inputs), torch.cat(inputs.scores))
        inner, outer = (quantize(part, DEFAULT_QUANTIZER) for part in (factors.inner, factors.outer))
        return layer_arrays(LayerPredictor(inner, outer, factors.bias)) | {STATES: states.numpy()}

    def _factors(self, layer: int, inputs: Tensor, scores: Tensor) -> Factors:
        if not inputs.isfinite().all():
            raise ModelError(
                f"layer {layer} of this model computes values that are not finite; its neurons can't be predicted."
            )
        block, name = neuron_blocks(self._spec)[layer], first_matrix(self._spec)
        first = self._weights.matrices[block.tensors[name].name].dequantize()
        shift = torch.full((len(first),), -self._spec.activation_threshold)
        if f"{name}_bias" in block.tensors:
            shift += self._weights.vectors[block.tensors[f"{name}_bias"].name]
        return fit_factors(inputs, scores, first, shift, self._rank, self._training)

    def _embedded(self) -> Tensor:
        executor = ReferenceExecutor(self._spec, self._weights, 1)
        return torch.cat([executor.embed(Batch.of_sequence(0, 0, list(chunk))) for chunk in self._fitted])

    def _through(self, layer: int, states: Tensor, inputs: "FfnInputs") -> Tensor:
        """Run all chunks' states (tokens, hidden) through one layer, whose weights are dequantized once."""
        spec, longest = self._spec, max(map(len, self._fitted))
        matrices = {name: each for name, each in self._weights.matrices.items() if name.startswith(f"layers.{layer}.")}
        weights = expanded(ModelWeights(matrices, self._weights.vectors))
        cache = host_cache(spec, longest, ReferenceExecutor.kv_type, [layer])
        executor, behind = ReferenceExecutor(spec, weights, longest, inputs, cache=cache), []
        for chunk, hidden in zip(self._fitted, torch.split(states, [*map(len, self._fitted)]), strict=True):
            sequence = cache.open_new()
            behind.append(executor.run(Batch.of_sequence(sequence, 0, list(chunk)), hidden, range(layer, layer + 1)))
            cache.close(sequence)
        return torch.cat(behind)


class FfnInputs(BatchedTorchOps):
    """Recorder of the inputs of sparse FFNs and of their neurons' scores. Each pass must be one whole chunk."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []  # fp32 (m, hidden)
        self.scores: list[Tensor] = []  # bf16 (m, ffn): half the memory, with the range of fp32

    def neurons(self, x: Tensor, active: Tensor, up: Weight | None, down: Weight) -> Tensor:
        norms = torch.linalg.vector_norm(down.dequantize(), dim=1)
        self.inputs.append(x[FIRST_SPARSE:])
        self.scores.append((active[FIRST_SPARSE:].abs() * norms).bfloat16())
        return super().neurons(x, active, up, down)


class ActiveNeurons(BatchedTorchOps):
    """Counter of active neurons, whether or not the predictor finds them. Each pass must be one whole chunk."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        names = (block.tensors[first_matrix(spec)].name for block in neuron_blocks(spec))
        self._spec, self._firsts = spec, {id(weights.matrices[name]) for name in names}
        self.n_active = 0

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        found = super().product(x, weight, bias)
        if id(weight) in self._firsts:
            kind, threshold = self._spec.activation, self._spec.activation_threshold
            self.n_active += int(self.activated(found[FIRST_SPARSE:], kind, threshold).count_nonzero())
        return found
