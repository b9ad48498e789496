"""Convert a model to a store whose matrices are rounded for the inputs that they receive from a text."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_ee.config import Progress, warner
from hetero_ee.errors import ModelError, UsageError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.layers.tensors import TensorSpec
from hetero_ee.models.blocks import Block
from hetero_ee.ops.torch_ops import BatchedTorchOps, TorchMatrix
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee.quality.streamed import StreamedModel, opened
from hetero_ee.quality.texts import own_windows, text_windows
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.compensated import quantize_for_inputs, spans
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, Workers, quantize
from hetero_ee.weights.store.library import make_quantized, open_cached, require_checkpoint
from hetero_ee.weights.weight import TileWeight, Weight

CALIBRATED_TOKENS = 8192
FEW = 0.25  # of the tokens asked for: with fewer, matrices follow the text's own words more than the language
METHOD_VERSION = 1  # increases when the bytes of calibrated stores change
MOMENT_COLUMNS = 1024  # columns of second moments per task of a thread


def make_calibrated_store(
    folder: Path,
    texts: Sequence[str] | None = None,
    *,
    cache: Path,
    output: Path | None = None,
    quantizer: str | None = None,
    n_tokens: int = CALIBRATED_TOKENS,
    threads: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Convert the checkpoint in `folder` as `make_store` does, with matrices rounded for their inputs.

    Memory holds one block's weights in fp32, its inputs for all tokens, and second moments. If interrupted, the next
    call resumes: it passes the text through the finished blocks again. Weights whose 4-bit codes are kept stay as they
    are.

    Args:
        texts: texts to calibrate on, None for texts that the model writes, for which it is converted without
            calibration first.

    Raises:
        UsageError: if the text is too short, or all matrices keep the checkpoint's codes.
        HeteroError: as `make_store` does.
    """
    require_checkpoint(folder)
    if quantizer not in (None, DEFAULT_QUANTIZER):
        raise UsageError("calibration fits codebooks; leave out ", MODEL_OPTIONS["quantizer"], f" {shown(quantizer)}.")
    spec, plain = read_spec(folder), Quantization.of_model(folder, quantizer)
    if plain.own is not None:
        raise UsageError(
            f"{folder.name} keeps its own codes ({plain.own}), which calibration would not change; add ",
            MODEL_OPTIONS["quantizer"],
            f" {DEFAULT_QUANTIZER} to replace them.",
        )
    if texts is not None:
        windows = text_windows(Tokenizer.load(folder, spec.vocab_size), texts, n_tokens)
        if (n_found := sum(map(len, windows))) < FEW * n_tokens:
            warner(progress)(
                f"The text has only {n_found:,} tokens, so other texts may get worse; {n_tokens:,} or more are better."
            )
    else:
        store, _ = open_cached(folder, spec, plain, cache, threads=threads, progress=progress)
        windows = own_windows(store, n_tokens, threads, progress)
    identity = hashlib.sha256(json.dumps([METHOD_VERSION, windows]).encode()).hexdigest()[:16]

    def matrices(workers: Workers) -> "CalibratedMatrices":
        return CalibratedMatrices(StreamedModel(*opened(folder), windows, workers), workers)

    calibrated = replace(plain, calibration=identity)
    how: dict[str, Any] = {"threads": threads, "progress": progress, "fit_with": matrices}
    return make_quantized(folder, calibrated, cache=cache, output=output, **how)


class CalibratedMatrices:
    """Quantizes a model's matrices in the order of its blocks, through which a text passes meanwhile."""

    def __init__(self, model: StreamedModel, workers: Workers) -> None:
        self._model, self._workers = model, workers
        self._remaining = iter(model.layer_blocks())
        self._passed = {tensor.name for block in model.layer_blocks() for tensor in block.tensors.values()}
        self._inputs: dict[str, list[Tensor]] = {}  # of the last block's matrices

    def __call__(self, tensor: TensorSpec, values: Tensor, workers: Workers) -> TileWeight:
        """Quantize a matrix with these values (N, K). Later calls must not be about earlier blocks.

        A draft head's matrices, through which no text passes, are rounded without inputs.

        Raises: ModelError: if the model computes NaN or infinity for the text.
        """
        if tensor.name not in self._passed:
            return quantize(values, DEFAULT_QUANTIZER, workers)
        while tensor.name not in self._inputs:
            self._pass_block(next(self._remaining), tensor.name)
        inputs = self._inputs.pop(tensor.name)
        moments = [second_moments([x[:, span] for x in inputs], self._workers) for span in spans(values.shape[1])]
        if not all(bool(each.isfinite().all()) for each in moments):
            raise ModelError(f"{tensor.name} gets inputs that are not finite; the weights before it are damaged.")
        del inputs
        return quantize_for_inputs(values.float(), moments, workers)

    def _pass_block(self, block: Block, wanted: str) -> None:
        """Pass the text through a block, and keep its matrices' inputs if the matrix called `wanted` is one of them."""
        self._inputs = {}
        if wanted not in [tensor.name for tensor in block.tensors.values()]:
            self._model.pass_block(block, self._model.weights([block]))
            return
        observing: dict[int, ObservingOps] = {}
        self._model.pass_block(
            block, self._model.weights([block]), lambda group: observing.setdefault(group, ObservingOps())
        )
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
