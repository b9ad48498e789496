"""Deal bits out over a model's matrices: more where rounding to 4 bits changes the predictions more.

A matrix's rounding costs about the KL divergence that rounding its whole group costs, times its share of the group's
changes of hidden states. A group has the matrices of one kind in neighbouring layers. Costs at more bits follow from
the squared errors of weights, which KL divergence is proportional to while they are small.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from hetero_ee.config import Progress
from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.models.blocks import Block, all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.quality.streamed import StreamedModel
from hetero_ee.weights.quantizers import Workers, quantize
from hetero_ee.weights.tiles import region_bytes
from hetero_ee.weights.weight import DenseWeight

MEASURED_TOKENS = 512
N_DEPTHS = 3  # groups of neighbouring layers
LOGITS_TOKENS = 64
MEASURING = "Measuring which matrices need more bits"
# Layouts from narrow to wide, with the relative squared errors that quantizers cause in Gaussian weights.
ERRORS = {"int4": 5.4e-3, "int5": 1.6e-3, "int6": 2.7e-4, "int8": 2.8e-5}
Group = tuple[str, int]  # short name of matrices, and number of their layers' part of the model
Share = tuple[Group, float]  # a matrix's group, and the relative squared change of hidden states by its rounding


def rounding_costs(
    model: StreamedModel, quantizer: str, workers: Workers, progress: Progress | None = None
) -> dict[TensorSpec, float]:
    """Return the KL divergence in nats that rounding each of the layers' matrices to 4 bits costs, about.

    The model's states must be those after the embedding; they pass all layers once for the model and once for each
    group of matrices, which is rounded.
    """
    shares, runs = dict[TensorSpec, Share](), dict[Group, StreamedModel]()
    blocks = model.layer_blocks()
    for number, block in enumerate(blocks):
        if progress:
            progress(MEASURING, number, len(blocks))
        shares |= _pass_block(model, runs, block, quantizer, workers)
    reference = [torch.log_softmax(logits.double(), -1).float() for logits, _ in model.logits(LOGITS_TOKENS)]
    total = defaultdict[Group, float](float)
    for group, change in shares.values():
        total[group] += change
    nats = {group: _divergence(reference, run) for group, run in runs.items()}
    return {tensor: nats[group] * change / max(total[group], 1e-30) for tensor, (group, change) in shares.items()}


def _pass_block(
    model: StreamedModel, runs: dict[Group, StreamedModel], block: Block, quantizer: str, workers: Workers
) -> dict[TensorSpec, Share]:
    """Pass the model and the groups' runs through a block. Return the shares of its matrices."""
    weights, before = model.weights([block]), model.fork()
    depth = (block.layer or 0) * N_DEPTHS // model.spec.n_layers
    matrices = {(short, depth): tensor for short, tensor in block.tensors.items() if tensor.role is TensorRole.MATRIX}
    rounded = {}
    for group, tensor in matrices.items():
        made = DenseWeight(quantize(weights.matrices[tensor.name].dequantize(), quantizer, workers).dequantize())
        rounded[group] = replace(weights, matrices=weights.matrices | {tensor.name: made})
        runs.setdefault(group, model.fork())
    for group, run in runs.items():
        run.pass_block(block, rounded.get(group, weights))
    model.pass_block(block, weights)
    shares = {}
    for group, tensor in matrices.items():
        alone = before.fork()
        alone.pass_block(block, rounded[group])
        shares[tensor] = group, _change(alone.states, model.states)
    return shares


def _change(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    squares = [((one - other).square().mean(1), other.square().mean(1).clamp_min(1e-30)) for one, other in pairs]
    return float(torch.cat([change / whole for change, whole in squares]).mean())


def _divergence(reference: Sequence[Tensor], run: StreamedModel) -> float:
    """Return the mean KL divergence of a run's predictions from log-probabilities (m, vocab)."""
    nats = list[Tensor]()
    for expected, (logits, _) in zip(reference, run.logits(LOGITS_TOKENS), strict=True):
        found = torch.log_softmax(logits.double(), -1)
        nats.append((expected.exp() * (expected - found)).nan_to_num(0.0).sum(-1).clamp_min(0.0))
    return float(torch.cat(nats).mean())


def dealt_layouts(
    costs: Mapping[TensorSpec, float], n_bytes: int, own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a layout for each matrix, the narrowest if n_bytes are too few for all.

    The step to the next wider layout that saves most per byte is taken first, as long as bytes are left.

    Args:
        own: layouts of the matrices whose codes the file has, which cost nothing in their own layout.
    """
    errors = {tensor: _errors(tensor, (own or {}).get(tensor.name)) for tensor in costs}
    found = {tensor.name: next(iter(errors[tensor])) for tensor in costs}
    left = n_bytes - sum(layout_bytes(tensor, found[tensor.name]) for tensor in costs)
    for _, tensor, (narrow, wide) in sorted(_steps(costs, errors), key=lambda step: -step[0]):
        more = layout_bytes(tensor, wide) - layout_bytes(tensor, narrow)
        if found[tensor.name] == narrow and more <= left:
            found[tensor.name], left = wide, left - more
    return found


def _errors(tensor: TensorSpec, own: str | None) -> dict[str, float]:
    """Return the layouts that a matrix can have, with their errors. A file's own codes are the widest and exact."""
    if own is None:
        return ERRORS
    narrower = {name: error for name, error in ERRORS.items() if layout_bytes(tensor, name) < layout_bytes(tensor, own)}
    return narrower | {own: 0.0}


def _steps(
    costs: Mapping[TensorSpec, float], errors: Mapping[TensorSpec, dict[str, float]]
) -> Iterator[tuple[float, TensorSpec, tuple[str, str]]]:
    """Yield each step to a wider layout, with the KL divergence that it saves per byte."""
    for tensor, cost in costs.items():
        for narrow, wide in pairwise(errors[tensor]):
            saved = cost * (errors[tensor][narrow] - errors[tensor][wide]) / ERRORS["int4"]
            yield saved / (layout_bytes(tensor, wide) - layout_bytes(tensor, narrow)), tensor, (narrow, wide)


def layer_matrices(spec: ModelSpec) -> list[TensorSpec]:
    """Return the matrices of the layers, among which bits are dealt out."""
    layers = [block for block in decoder_blocks(spec.in_plain_int4) if block.layer is not None]
    return [tensor for tensor in all_tensors(layers) if tensor.role is TensorRole.MATRIX]


def least_bytes(matrices: Sequence[TensorSpec]) -> int:
    """Return the bytes of the matrices in the narrowest layout."""
    return sum(layout_bytes(each, "int4") for each in matrices)


def layout_bytes(tensor: TensorSpec, name: str) -> int:
    """Return the bytes of a matrix's tiles and scales in this layout."""
    n_rows, n_columns = tensor.shape
    return sum(region_bytes(name, n_rows, n_columns))
