"""Layers that differ from layer to layer, with a mixer of a kind that nothing else knows."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import host_cache
from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.decoder import LayerSpec
from hetero_ee.layers.ffn import FfnSpec
from hetero_ee.layers.ops import DELTA, Array, Mixer, MixerSpec, Ops, Parameters, Rows
from hetero_ee.layers.tensors import Tensors
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import model_parts
from hetero_ee.weights.model_weights import ModelWeights, is_quantized
from hetero_ee.weights.quantizers import quantize
from tests.executor_support import on_kernels, reference
from tests.families import config_of

IDS = [3, 7, 1, 9, 22, 14, 5, 80]


@dataclass(frozen=True)
class TurnSpec(MixerSpec):
    """One matrix, and no state."""

    name: ClassVar[str] = "turn"

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        tensors.matrix("matrix", hidden_size, hidden_size, bias=True)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> Mixer:
        return Turn(parameters.matrix("matrix"))


class Turn(Mixer):
    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        return ops.linear(x, self._matrix, DELTA)


def mixed(spec: ModelSpec) -> ModelSpec:
    """The model with another mixer and a narrower FFN in its first layer, and fewer, larger heads in its second."""
    first, second = spec.layer(0), spec.layer(1)
    assert isinstance(first.ffn, FfnSpec) and isinstance(second.mixer, AttentionSpec)
    own = LayerSpec(TurnSpec(), replace(first.ffn, size=first.ffn.size // 2))
    heads = replace(second.mixer, n_heads=3, n_kv_heads=1, head_dim=20)
    return replace(spec, own_layers=(own, replace(second, mixer=heads), *[None] * (spec.n_layers - 2)))


def random_weights(spec: ModelSpec) -> ModelWeights:
    generator, weights = torch.Generator().manual_seed(0), ModelWeights({}, {})
    for tensor in all_tensors(decoder_blocks(spec)):
        drawn = torch.randn(tensor.shape, generator=generator)
        if is_quantized(tensor.role):
            weights.matrices[tensor.name] = quantize(0.3 * drawn, "int8")
        else:
            weights.vectors[tensor.name] = 0.1 * drawn + 1.0
    return weights


@pytest.mark.parametrize("make", [reference, on_kernels])
def test_a_token_has_the_same_bits_whatever_its_batch_is(make: Any) -> None:
    spec = mixed(read_spec(config_of("llama")))
    executor = make((spec, random_weights(spec)))
    whole, alone = executor.cache.open_new(), executor.cache.open_new()
    expected = executor.logits(Batch.of_sequence(whole, 0, IDS), range(len(IDS)))
    for position, token in enumerate(IDS):
        row = executor.logits(Batch.of_sequence(alone, position, [token]), [0])[0]
        assert torch.equal(row, expected[position])
    executor.close()


def test_the_planner_reads_what_the_mixer_declares() -> None:
    spec = read_spec(config_of("llama"))
    plain, parts = model_parts(spec, "fp16"), model_parts(mixed(spec), "fp16")
    assert [part.name for part in parts[1:4]] == ["layers.0.turn", "layers.0.ffn", "layers.1.attention"]
    assert [part.kv_bytes(1) for part in parts[1:6:2]] == [0, 2 * 2 * 20, plain[5].kv_bytes(1)]
    assert parts[2].weight_bytes < plain[2].weight_bytes
    assert [part.cost for part in parts[4:]] == [part.cost for part in plain[4:]]


def test_the_cache_has_a_part_for_each_shape() -> None:
    spec = mixed(read_spec(config_of("llama")))
    cache = host_cache(spec, 160, "fp16")
    assert [part.held_layers for part in cache.parts] == [(0,), (1,), tuple(range(2, spec.n_layers))]
    sequence = cache.open_new()
    cache.admit(Batch.of_sequence(sequence, 0, IDS))
    assert cache.lengths(sequence) == [len(IDS)] * spec.n_layers
    assert cache.truncate(sequence, 3) == 3
    cache.check()
    cache.max_tokens = 4
    with pytest.raises(ValueError, match="of 4 tokens"):
        cache.admit(Batch.of_sequence(sequence, 3, IDS))
    assert cache.lengths(sequence) == [3] * spec.n_layers


def test_layers_that_say_what_the_model_says_change_nothing() -> None:
    spec = read_spec(config_of("gemma3"))
    same = replace(spec, own_layers=tuple(spec.layer(layer) for layer in range(spec.n_layers)))
    assert decoder_blocks(same) == decoder_blocks(spec)
