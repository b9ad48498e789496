"""RoPE: bit-equal to fp32 products with the table's own angles, and to 2e-7 of the torch reference at any position."""

import numpy as np
import pytest
import torch

from hetero_ee.layers.rope import RopeScaling, RopeSpec
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee_cpu_ops.attention.rope import Rope
from tests.cpu_support import assert_close, assert_same_bits, guarded_copy


def case(seed):
    rng = np.random.default_rng(seed)
    head_dim = int(rng.choice([8, 12, 20, 64, 80, 128]))
    turning = 2 * int(rng.integers(1, head_dim // 2 + 1)) if rng.random() < 0.5 else head_dim
    m, n_heads = int(rng.integers(1, 18)), int(rng.integers(1, 5))
    first, rest = int(rng.integers(0, 20)), int(rng.integers(0, 20))
    x = rng.normal(size=(m, first + n_heads * head_dim + rest)).astype(np.float32)
    positions = rng.integers(0, int(rng.choice([4, 300, 5000])), m)
    return RopeSpec(1e4, turning), x, positions, first, n_heads, head_dim


def turned(rope, x, positions, first, n_heads, head_dim):
    changed = guarded_copy(x)
    rope.rotate(changed.array, positions, first, n_heads, head_dim)
    changed.check()
    return changed.array


def reference(spec, x, positions, first, n_heads, head_dim, *, ops_positions=None):
    end = first + n_heads * head_dim
    heads = torch.from_numpy(x[:, first:end].copy()).view(len(x), n_heads, head_dim)
    y = TorchOps().rope(heads, tuple(int(p) for p in (positions if ops_positions is None else ops_positions)), spec)
    return np.concatenate([x[:, :first], y.reshape(len(x), -1).numpy(), x[:, end:]], 1)


def test_matches_torch():
    for seed in range(150):
        spec, *arguments = case(seed)
        rope = Rope(spec.inverse_frequencies())
        assert_close(turned(rope, *arguments), reference(spec, *arguments).astype(np.float64), 2e-7)


def test_matches_float64_of_the_same_angle():
    spec, x, positions, first, n_heads, head_dim = case(7)
    angles = positions.astype(np.float32)[:, None] * np.array(spec.inverse_frequencies(), np.float32)
    c, s = np.cos(angles.astype(np.float64))[:, None], np.sin(angles.astype(np.float64))[:, None]
    half = spec.n_features // 2
    y = turned(Rope(spec.inverse_frequencies()), x, positions, first, n_heads, head_dim)
    before, after = (
        part[:, first : first + n_heads * head_dim].reshape(len(x), n_heads, head_dim).astype(np.float64)
        for part in (x, y)
    )
    a, b = before[..., :half], before[..., half : 2 * half]
    assert_close(after[..., :half], a * c - b * s, 2e-7)
    assert_close(after[..., half : 2 * half], b * c + a * s, 2e-7)


def test_bits_depend_on_the_position_alone():
    for seed in range(300):
        spec, x, positions, first, n_heads, head_dim = case(seed)
        frequencies = spec.inverse_frequencies()
        whole = turned(Rope(frequencies), x, positions, first, n_heads, head_dim)
        grown = Rope(frequencies)  # its table grows from row to row
        for row in np.argsort(positions):
            alone = turned(grown, x[row : row + 1].copy(), positions[row : row + 1].copy(), first, n_heads, head_dim)
            assert_same_bits(alone[0], whole[row])


def test_llama3_frequencies_at_a_long_context():
    spec = RopeSpec(5e5, 128, RopeScaling("llama3", 8.0))
    x, positions = (
        np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32),
        np.array([0, 131071, 8191, 100000]),
    )
    found = turned(Rope(spec.inverse_frequencies()), x, positions, 0, 2, 128)
    assert_close(found, reference(spec, x, positions, 0, 2, 128).astype(np.float64), 2e-7)
    assert_same_bits(found[0], x[0])


def test_wrong_arguments_are_refused():
    rope, x, positions = Rope([1.0, 0.1]), np.zeros((2, 16), np.float32), np.zeros(2, np.int64)
    for bad in (
        lambda: rope.rotate(x, positions, 0, 5, 4),
        lambda: rope.rotate(x, positions, 1, 4, 4),
        lambda: rope.rotate(x, positions, -1, 2, 4),
        lambda: rope.rotate(x, positions, 0, 2, 3),
        lambda: rope.rotate(x, positions[:1], 0, 2, 4),
        lambda: rope.rotate(x, positions - 1, 0, 2, 4),
        lambda: rope.rotate(x, positions + 2**24, 0, 2, 4),
        lambda: rope.rotate(x.astype(np.float64), positions, 0, 2, 4),
        lambda: rope.rotate(x.T, positions, 0, 2, 4),
    ):
        with pytest.raises(ValueError):
            bad()
    assert (x == 0).all()


@pytest.mark.parametrize("bug", ["position", "pairing", "sign", "head"])
def test_the_tolerance_catches(bug):
    spec = RopeSpec(1e4, 64)
    x = np.random.default_rng(1).normal(size=(3, 128)).astype(np.float32)
    positions = np.array([3, 40, 7])
    expected = reference(spec, x, positions, 0, 2, 64, ops_positions=positions + 1 if bug == "position" else None)
    if bug == "pairing":
        swapped = x.reshape(3, 2, 32, 2).transpose(0, 1, 3, 2).reshape(3, 128)
        expected = reference(spec, swapped, positions, 0, 2, 64)
    if bug == "sign":
        expected = reference(RopeSpec(1e4, 64), x, -positions, 0, 2, 64)
    if bug == "head":
        expected = np.roll(expected.reshape(3, 2, 64), 1, 1).reshape(3, 128)
    with pytest.raises(AssertionError):
        assert_close(
            turned(Rope(spec.inverse_frequencies()), x, positions, 0, 2, 64), expected.astype(np.float64), 2e-7
        )
