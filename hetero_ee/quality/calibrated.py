"""Round a model's matrices for the inputs that they receive from a text, which passes block by block meanwhile."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_ee.errors import ModelError
from hetero_ee.layers.tensors import TensorSpec
from hetero_ee.models.blocks import Block
from hetero_ee.ops.torch_ops import BatchedTorchOps, TorchMatrix
from hetero_ee.quality.streamed import StreamedModel
from hetero_ee.weights.compensated import quantize_for_inputs, spans
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, Workers, quantize
from hetero_ee.weights.weight import TileWeight, Weight

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
        self._inputs, observing = {}, dict[int, ObservingOps]()
        weights = self._model.weights([block])
        self._model.pass_block(block, weights, lambda group: observing.setdefault(group, ObservingOps()))
        for group in sorted(observing):
            for name, x in observing[group].inputs:
                self._inputs.setdefault(name, []).append(x)


class ObservingOps(BatchedTorchOps):
    """Operations that keep copies of all matrices' inputs (m, K), with the matrices' names."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self.inputs: list[tuple[str, Tensor]] = []

    def matrix(self, name: str, weight: Weight, bias: Tensor | None) -> TorchMatrix:
        self._names[id(weight)] = name
        return super().matrix(name, weight, bias)

    def linear(self, x: Tensor, matrix: TorchMatrix, into: str) -> Tensor:
        self._observe(x, matrix)
        return super().linear(x, matrix, into)

    def of_expert(self, x: Tensor, matrix: TorchMatrix, expert: int, n_rows: int) -> Tensor:
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
