"""Times what a GPU segment does besides multiplying and attending: norms, rotations, cache, activations, launches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hetero_ee.models.blocks import TensorRole, all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.gpu.operations import GpuOperations
from hetero_ee.runtime.gpu.segment import GpuSegment
from hetero_ee.runtime.kv.gpu import GpuKvCache
from hetero_ee.weights.model_weights import ModelWeights, is_quantized
from hetero_ee.weights.random_weights import CODEBOOK, RANDOM
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.gpu.platform import GpuPlatform

FEW_LAYERS, MANY_LAYERS = 1, 9
SMALL_VOCABULARY = 64  # the embedding's rows are as long as the model's, and few


@dataclass(frozen=True, slots=True)
class OverheadSamples:
    """Seconds of m rows at the end of a cache of context_tokens: of one layer, and of a pass without layers."""

    m: int
    context_tokens: int
    layer_s: tuple[float, ...]
    whole_pass_s: tuple[float, ...]


def probe_gpu_overheads(
    spec: ModelSpec,
    platform: GpuPlatform,
    operations: GpuOperations,
    argmax: Callable[[Any], Any],
    points: Sequence[tuple[int, int]],
    repeats: int,
    clock: Callable[[], float],
) -> list[OverheadSamples]:
    """Samples for each (m, context_tokens); layers are counted out by the difference of two depths.

    A pass has in it what surrounds a segment: slots and positions to the GPU, final norm, the winning token back to the
    CPU. Its hidden states are made on the GPU: bringing them there is the link's transfer.
    """
    max_tokens = max(context for _, context in points)
    bare = _without_products(operations)
    segments = [_segment(shallow(spec, depth), platform, bare, max_tokens) for depth in (FEW_LAYERS, MANY_LAYERS)]
    finish = _finish(spec, platform, bare, argmax)
    found = []
    for m, context in points:
        runs = [_prepared(segment, m, context, finish) for segment in segments]
        layers, passes = [], []
        for _ in range(repeats):
            few_s, many_s = (timed(run, clock) for run in runs)
            layer_s = max((many_s - few_s) / (MANY_LAYERS - FEW_LAYERS), 1e-9)
            layers.append(layer_s)
            passes.append(max(few_s - FEW_LAYERS * layer_s, 1e-9))
        found.append(OverheadSamples(m, context, tuple(layers), tuple(passes)))
    return found


def timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Seconds of one run."""
    start_s = clock()
    run()
    return clock() - start_s


def shallow(spec: ModelSpec, n_layers: int) -> ModelSpec:
    """The model with so many layers and few tokens: without its products nothing else depends on them."""
    windows = tuple(None for _ in range(n_layers))
    return replace(
        spec, n_layers=n_layers, sliding_windows=windows, vocab_size=SMALL_VOCABULARY, learned_position_offset=None
    )


def _segment(spec: ModelSpec, platform: GpuPlatform, operations: GpuOperations, max_tokens: int) -> GpuSegment:
    cache = GpuKvCache((spec.n_layers, spec.n_kv_heads, spec.head_dim), max_tokens, platform.device, n_slots=1)
    recorder = platform.recorded if operations.is_capturable else None
    return GpuSegment(
        spec, _dummy_weights(spec), decoder_blocks(spec)[1 : 1 + 2 * spec.n_layers], cache, operations, recorder
    )


def _prepared(segment: GpuSegment, m: int, context_tokens: int, finish: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """One pass of m rows at the end of a cache of that length, to be called again and again, warm."""
    cache, before = segment.cache, context_tokens - m
    cache.close(0)
    cache.open(0)
    if before:
        cache.admit(Batch.of_sequence(0, 0, [0] * before))
    batch = Batch.of_sequence(0, before, [0] * m)
    hidden = torch.ones(m, segment.spec.hidden_size, device=cache.pages.codes.device)

    def run() -> None:
        cache.admit(batch)
        finish(segment.run(hidden, batch))
        cache.truncate(0, before)

    run()
    run()  # the first one compiles and records
    return run


def _finish(
    spec: ModelSpec, platform: GpuPlatform, operations: GpuOperations, argmax: Callable[[Any], Any]
) -> Callable[[Tensor], Any]:
    """What follows the last layer, but for the head's product: hidden states of all rows -> the token on the CPU."""
    device = platform.device
    scale, bias = torch.ones(spec.hidden_size, device=device), torch.zeros(spec.hidden_size, device=device)
    last, logits = torch.ones(1, spec.hidden_size, device=device), torch.zeros(1, spec.vocab_size, device=device)

    def finish(hidden: Tensor) -> int:
        last.copy_(hidden[-1:])
        if spec.norm == "layer":
            operations.layer_norm(last, scale, bias, spec.norm_eps)
        else:
            operations.rms_norm(last, scale, spec.norm_eps)
        return int(argmax(logits)[0])

    return finish


def _without_products(operations: GpuOperations) -> GpuOperations:
    return replace(
        operations,
        matmul_int4=_nothing,
        matmul_int8=_nothing,
        attention=_nothing,
        prepare_int4=_nothing,
        prepare_int8=_nothing,
    )


def _nothing(*arguments: Any, **options: Any) -> None:
    """In the place of a product, whose output keeps what it holds."""


def _dummy_weights(spec: ModelSpec) -> ModelWeights:
    """Matrices without their tiles, which nothing multiplies by; norms are 1, biases 0."""
    weights = ModelWeights({}, {}, RANDOM)
    for tensor in all_tensors(decoder_blocks(spec)):
        if is_quantized(tensor.role):
            codebook = CODEBOOK if tensor.role is TensorRole.MATRIX else None
            n_rows, n_columns = tensor.shape
            weights.matrices[tensor.name] = TileWeight(torch.empty(0), torch.empty(0), 0, codebook, n_rows, n_columns)
        else:
            weights.vectors[tensor.name] = torch.full(tensor.shape, 0.0 if tensor.name.endswith("bias") else 1.0)
    return weights
