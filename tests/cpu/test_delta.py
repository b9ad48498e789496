"""The gated delta rule's kernel against the plain reference, and its bits in batches, chunks and teams."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.recurrent import RecurrentCache
from hetero_ee.layers.delta import GatedDeltaSpec
from hetero_ee.layers.ops import Norm
from hetero_ee.ops.cpu import CpuOps
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee_cpu_ops.activate import gate
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

SHAPES = {  # n_key_heads, n_value_heads, key_dim, value_dim, kernel, is_tiled
    "like Qwen": (2, 6, 128, 128, 4, False),
    "tiled": (2, 6, 16, 32, 4, True),
    "odd": (3, 3, 7, 19, 2, False),
    "one value": (1, 2, 2, 1, 5, True),
}
N_TOKENS = 70
CUTS = [0, 1, 2, 5, 30, 31, 70]


class Layer:
    """One layer with random parameters on the given operations, with its cache."""

    def __init__(self, name: str, ops: Any) -> None:
        n_key_heads, n_value_heads, key_dim, value_dim, kernel, is_tiled = SHAPES[name]
        self.spec = GatedDeltaSpec(
            n_key_heads=n_key_heads,
            n_value_heads=n_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            kernel=kernel,
            norm_eps=1e-6,
            is_tiled=is_tiled,
        )
        random = np.random.default_rng(0)
        vectors = [(self.spec.n_channels, kernel), (n_value_heads,), (n_value_heads,), (value_dim,)]
        conv, a_log, dt_bias, scale = (random.standard_normal(shape, np.float32) for shape in vectors)
        self.inputs = random.standard_normal((N_TOKENS, self.spec.n_channels + self.spec.value_size), np.float32)
        self.gates = 3 * random.standard_normal((N_TOKENS, 2 * n_value_heads), np.float32)
        self.cache, self._ops = RecurrentCache(self.spec.state, 1000, [4, 7]), ops
        self._array: Any = torch.from_numpy if isinstance(ops, TorchOps) else lambda x: x
        parameters = self._array(conv), self._array(a_log), self._array(dt_bias)
        self._rule = ops.delta_rule(self.spec, 7, self.cache, parameters, Norm("rms", self._array(scale), None, 1e-6))

    def run(self, batch: Batch) -> Any:
        """Outputs (m, value_size), NumPy. A token's inputs are those of its position."""
        self.cache.admit(batch)
        at = list(batch.positions)
        inputs, gates = self._array(self.inputs[at].copy()), self._array(self.gates[at].copy())
        return np.asarray(self._ops.gated_delta(inputs, gates, self._rule, self._ops.rows(batch, NeuronCounts())))


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(ThreadPool(1))


def whole(layer: Layer) -> Any:
    return layer.run(Batch.of_sequence(layer.cache.open_new(), 0, [0] * N_TOKENS))


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_state_are_those_of_the_reference(name: str, ops: CpuOps) -> None:
    plain, layer = Layer(name, TorchOps()), Layer(name, ops)
    expected = whole(plain)
    assert np.abs(whole(layer) - expected).max() <= 2e-5 * np.abs(expected).max()
    for found, wanted in zip(layer.cache.stored(7, 0, 0, 0), plain.cache.stored(7, 0, 0, 0), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_bits_depend_on_neither_chunks_nor_neighbours_nor_threads(name: str, ops: CpuOps) -> None:
    expected, layer, pool = whole(Layer(name, ops)), Layer(name, ops), ThreadPool(3)
    sequence = layer.cache.open_new()
    for first, end in pairwise(CUTS):
        found = layer.run(Batch.of_sequence(sequence, first, [0] * (end - first)))
        assert np.array_equal(found, expected[first:end])
    shared = Layer(name, CpuOps(pool))
    several = [shared.cache.open_new() for _ in range(3)]
    batch = Batch((0,) * 60, tuple(several * 20), tuple(at for at in range(20) for _ in several))
    assert np.array_equal(shared.run(batch), expected[:20].repeat(3, axis=0))
    pool.close()


def test_wide_gates_are_sigmoids() -> None:
    """Of columns of a wider array, with large values."""
    x, wide = np.ones((3, 21), np.float32), 30 * np.random.default_rng(1).standard_normal((3, 50), np.float32)
    assert np.allclose(gate(x, wide[:, -21:]), 1 / (1 + np.exp(-wide[:, -21:].astype(np.float64))), rtol=1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        gate(x, wide)
