"""Round a model's matrices for the inputs that they receive from a text, which passes block by block meanwhile."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hetero_ee.errors import ModelError
from hetero_ee.layers.tensors import TensorSpec
from hetero_ee.models.blocks import Block
from hetero_ee.ops.torch_ops import BatchedTorchOps, TorchMatrix
from hetero_ee.quality.streamed import StreamedModel
from hetero_ee.weights.compensated import quantize_for_inputs, spans
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, Workers, quantize
from hetero_ee.weights.store.conversion import Written
from hetero_ee.weights.weight import DenseWeight, TileWeight, Weight

# Of the mean second moment. With 0.01, the correction follows the text's own errors: SmolLM2-135M, its first 8 layers
# rounded, had up to a third more KL divergence on another novel instead of a seventh less (2026-11-29).
CORRECTION_DAMPING = 0.3
MOMENT_COLUMNS = 1024  # columns of second moments per task of a thread


class CalibratedMatrices:
    """Quantizes a model's matrices in the order of its blocks, through which a text passes meanwhile."""

    def __init__(self, model: StreamedModel, workers: Workers) -> None:
        self._model, self._workers = model, workers
        self._remaining = iter(model.layer_blocks())
        self._passed = {tensor.name for block in model.layer_blocks() for tensor in block.tensors.values()}
        self._inputs: dict[str, list[Tensor]] = {}  # of the last block's matrices

    def __call__(self, tensor: TensorSpec, values: Tensor, quantizer: str, workers: Workers) -> TileWeight:
        """Quantize a matrix with these values (N, K). Later calls must not be about earlier blocks.

        A draft head's matrices, through which no text passes, are rounded without inputs.
        """
        if tensor.name not in self._passed:
            return quantize(values, quantizer, workers)
        layout = "int4" if quantizer == DEFAULT_QUANTIZER else quantizer
        return quantize_for_inputs(values.float(), self.moments(tensor), layout, workers)

    def moments(self, tensor: TensorSpec) -> list[Tensor]:
        """Return the second moments of a matrix's inputs, for each of its spans. A matrix has them once.

        Raises: ModelError: if the model computes NaN or infinity for the text.
        """
        while tensor.name not in self._inputs:
            self._pass_block(next(self._remaining))
        inputs = self._inputs.pop(tensor.name)
        found = [second_moments([x[:, span] for x in inputs], self._workers) for span in spans(tensor.shape[1])]
        if not all(bool(each.isfinite().all()) for each in found):
            raise ModelError(f"{tensor.name} gets inputs that are not finite; the weights before it are damaged.")
        return found

    def _pass_block(self, block: Block) -> None:
        """Pass the text through a block, and keep its matrices' inputs."""
        self._inputs = observed_inputs(self._model, block, self._model.weights([block]))


class CorrectedMatrices(CalibratedMatrices):
    """Quantizes a model's matrices as CalibratedMatrices does, and each one makes up for errors of earlier ones.

    The text passes the model twice: exact, and through the matrices that are quantized already. A matrix gets the
    inputs of the latter, and its weights change first so that its products come closer to those of the exact inputs
    (as in GPTAQ, arXiv 2504.02692, here by linear regression before rounding; derived). Experts, whose tokens may
    differ between both, are only calibrated.

    Args:
        written: returns a matrix that the store has already, None if it lacks it.
    """

    def __init__(self, model: StreamedModel, workers: Workers, written: Written) -> None:
        super().__init__(model, workers)
        self._rounded, self._written = model.fork(), written
        self._block: Block | None = None

    def __call__(self, tensor: TensorSpec, values: Tensor, quantizer: str, workers: Workers) -> TileWeight:
        found = self._rounded_inputs(tensor) if tensor.name in self._passed else []
        exact = self._inputs.get(tensor.name, [])
        if [x.shape for x in found] == [x.shape for x in exact] and found:
            values = self._corrected(values.float(), exact, found)
            self._inputs[tensor.name] = found
        return super().__call__(tensor, values, quantizer, workers)

    def _rounded_inputs(self, tensor: TensorSpec) -> list[Tensor]:
        """Return the inputs of a matrix behind those that are quantized already, none of an expert's."""
        while tensor.name not in self._inputs:
            self._pass_block(next(self._remaining))
        assert self._block is not None, "a block was passed"
        return observed_inputs(self._rounded.fork(), self._block, self._rounded_weights(), with_experts=False).get(
            tensor.name, []
        )

    def _corrected(self, values: Tensor, exact: Sequence[Tensor], found: Sequence[Tensor]) -> Tensor:
        """Return the weights (N, K) whose products with the inputs found are nearest to those with the exact ones.

        They change by W E[(x - y) y^T] (E[y y^T] + damping)^-1 for exact inputs x and found inputs y.
        """
        corrected, n_rows = values.clone(), sum(map(len, found))
        for span in spans(values.shape[1]):
            moments = second_moments([y[:, span] for y in found], self._workers)
            moments.diagonal().add_(CORRECTION_DAMPING * moments.diagonal().mean().clamp_min(1e-30))
            errors = torch.zeros(values[:, span].shape)
            for x, y in zip(exact, found, strict=True):
                errors += ((x[:, span] - y[:, span]) @ values[:, span].T).T @ y[:, span] / n_rows
            factor, failed = torch.linalg.cholesky_ex(moments)
            if not failed:
                corrected[:, span] += torch.cholesky_solve(errors.T, factor).T
        return corrected

    def _rounded_weights(self) -> ModelWeights:
        """Read the last block's weights, with the matrices that the store has."""
        assert self._block is not None, "a block was passed"
        weights = self._model.weights([self._block])
        stored = {name: self._written(name) for name in weights.matrices}
        rounded = {name: DenseWeight(matrix.dequantize()) for name, matrix in stored.items() if matrix is not None}
        return replace(weights, matrices=weights.matrices | rounded)

    def _pass_block(self, block: Block) -> None:
        if self._block is not None:
            self._rounded.pass_block(self._block, self._rounded_weights())
        self._block = block
        super()._pass_block(block)


def observed_inputs(
    model: StreamedModel, block: Block, weights: ModelWeights, *, with_experts: bool = True
) -> dict[str, list[Tensor]]:
    """Pass a model through a block. Return the inputs (m, K) of its matrices, in the order of groups of texts."""
    inputs, observing = dict[str, list[Tensor]](), dict[int, ObservingOps]()
    model.pass_block(block, weights, lambda group: observing.setdefault(group, ObservingOps(with_experts)))
    for group in sorted(observing):
        for name, x in observing[group].inputs:
            inputs.setdefault(name, []).append(x)
    return inputs


class ObservingOps(BatchedTorchOps):
    """Operations that keep copies of all matrices' inputs (m, K), with the matrices' names."""

    def __init__(self, with_experts: bool) -> None:
        self._names, self._with_experts = dict[int, str](), with_experts
        self.inputs: list[tuple[str, Tensor]] = []

    def matrix(self, name: str, weight: Weight, bias: Tensor | None) -> TorchMatrix:
        self._names[id(weight)] = name
        return super().matrix(name, weight, bias)

    def linear(self, x: Tensor, matrix: TorchMatrix, into: str) -> Tensor:
        self._observe(x, matrix)
        return super().linear(x, matrix, into)

    def of_expert(self, x: Tensor, matrix: TorchMatrix, expert: int, n_rows: int) -> Tensor:
        if self._with_experts:
            self._observe(x, matrix)
        return super().of_expert(x, matrix, expert, n_rows)

    def _observe(self, x: Tensor, matrix: TorchMatrix) -> None:
        self.inputs.append((self._names[id(matrix.weight)], x.clone()))


def second_moments(inputs: Sequence[Tensor], workers: Workers) -> Tensor:
    """Return the mean of x x^T, fp32 (K, K), over all rows x of the inputs (m, K). Bits don't depend on `workers`."""
    n_columns, n_rows = inputs[0].shape[1], sum(map(len, inputs))
    moments = torch.empty(n_columns, n_columns)

    def fill(first: int) -> None:
        rows, columns = slice(first, first + MOMENT_COLUMNS), slice(0, first + MOMENT_COLUMNS)
        total = torch.zeros_like(moments[rows, columns])
        for x in inputs:
            total.addmm_(x[:, rows].T, x[:, columns])
        moments[columns, rows] = total.div_(n_rows).T
        moments[rows, columns] = total

    list(workers(fill, range(0, n_columns, MOMENT_COLUMNS)))
    return moments
