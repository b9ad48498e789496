"""RMSNorm and LayerNorm against float64, 1e-6 of the largest output; bits by row alone."""

import numpy as np
import pytest

from hetero_ee_cpu_ops.norm import layer_norm, rms_norm, rms_norm_heads
from tests.cpu_support import Guarded, assert_close, assert_same_bits, guarded_copy

WIDTHS = (1, 7, 15, 16, 17, 32, 63, 64, 65, 100, 127, 576, 4096, 8191)
EPS = 1e-5


def reference(x, kind, scale, bias, eps=EPS):
    x = x.astype(np.float64)
    centered = x - x.mean(1, keepdims=True) if kind == "layer" else x
    y = centered / np.sqrt((centered**2).mean(1, keepdims=True) + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def run(x, kind, scale, bias, out=None, delta=None):
    if kind == "rms":
        return rms_norm(x, scale, EPS, out, delta=delta)
    return layer_norm(x, scale, bias, EPS, out, delta=delta)


def random_case(seed):
    rng = np.random.default_rng(seed)
    n, m, kind = int(rng.choice(WIDTHS[:12])), int(rng.integers(1, 18)), str(rng.choice(["rms", "layer"]))
    x = (rng.normal(size=(m, n)) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
    scale, bias = (rng.normal(size=n).astype(np.float32) if rng.random() < 0.7 else None for _ in range(2))
    return rng, x, kind, scale, bias if kind == "layer" else None


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("n", WIDTHS)
def test_norm_is_accurate_and_stays_inside(n, kind):
    rng = np.random.default_rng(n)
    x = (rng.normal(size=(5, n)) * 3 + (kind == "layer")).astype(np.float32)
    scale, bias = rng.normal(size=(2, n)).astype(np.float32)
    for s, b in ((scale, bias), (scale, None), (None, None)):
        b = b if kind == "layer" else None
        out = Guarded(x.shape, np.float32)
        assert run(x, kind, s, b, out.array) is out.array
        out.check()
        assert_close(out.array, reference(x, kind, s, b), 1e-6)


def test_a_row_has_the_same_bits_in_any_batch():
    for seed in range(300):
        rng, x, kind, scale, bias = random_case(seed)
        whole = run(x, kind, scale, bias)
        for row in range(len(x)):
            assert_same_bits(run(x[row : row + 1].copy(), kind, scale, bias)[0], whole[row])
        order = rng.permutation(len(x))
        assert_same_bits(run(x[order], kind, scale, bias), whole[order])


def test_delta_is_added_in_place_first():
    for seed in range(100):
        rng, x, kind, scale, bias = random_case(seed)
        delta = rng.normal(size=x.shape).astype(np.float32)
        hidden = guarded_copy(x)
        y = run(hidden.array, kind, scale, bias, delta=delta)
        hidden.check()
        assert_same_bits(hidden.array, x + delta)
        assert_same_bits(y, run(x + delta, kind, scale, bias))


def test_out_may_be_the_input():
    for seed in range(50):
        _, x, kind, scale, bias = random_case(seed)
        same = x.copy()
        assert_same_bits(run(same, kind, scale, bias, same), run(x, kind, scale, bias))


def test_heads_are_normed_where_they_lie():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        m, n_heads, head_dim = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.choice([8, 12, 20, 64, 128]))
        first, rest = int(rng.integers(0, 40)), int(rng.integers(0, 40))
        x = rng.normal(size=(m, first + n_heads * head_dim + rest)).astype(np.float32)
        scale = rng.normal(size=head_dim).astype(np.float32)
        changed, end = guarded_copy(x), first + n_heads * head_dim
        rms_norm_heads(changed.array, scale, EPS, first, n_heads)
        changed.check()
        expected = rms_norm(np.ascontiguousarray(x[:, first:end]).reshape(-1, head_dim), scale, EPS).reshape(m, -1)
        assert_same_bits(changed.array, np.concatenate([x[:, :first], expected, x[:, end:]], 1))


def test_a_row_of_zeros_gives_zeros():
    assert (rms_norm(np.zeros((2, 40), np.float32), None, EPS) == 0).all()
    assert (layer_norm(np.full((2, 40), 3, np.float32), None, None, EPS) == 0).all()


def test_wrong_arguments_are_refused():
    x, scale = np.zeros((2, 32), np.float32), np.zeros(32, np.float32)
    for bad in (
        lambda: rms_norm(x.astype(np.float64), scale, EPS),
        lambda: rms_norm(x, scale[:31], EPS),
        lambda: rms_norm(x, scale, EPS, np.zeros((2, 31), np.float32)),
        lambda: rms_norm(np.zeros((2, 64), np.float32)[:, ::2], scale, EPS, x),
        lambda: rms_norm(x, scale, EPS, delta=x[:1].copy()),
        lambda: layer_norm(x, scale, scale[:1].copy(), EPS),
        lambda: rms_norm_heads(x, scale, EPS, 1, 1),
        lambda: rms_norm_heads(x, scale, EPS, -1, 1),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize("bug", ["eps", "n", "tail", "lane", "mean", "scale"])
def test_the_tolerance_catches(bug):
    """Mistakes a kernel could hold, put into the reference: the comparison above must see each."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3, 577)).astype(np.float32) + np.float32(0.01)
    scale = rng.normal(size=577).astype(np.float32)
    wrong = x.copy()
    if bug == "tail":
        wrong[:, -1] = 0
    if bug == "lane":
        wrong[:, 63] = wrong[:, 62]
    expected = reference(wrong, "rms", np.roll(scale, bug == "scale"), None, 2e-5 if bug == "eps" else EPS)
    expected *= {"n": np.sqrt(576 / 577)}.get(bug, 1)
    if bug == "mean":
        expected = reference(x, "layer", scale, None)
    with pytest.raises(AssertionError):
        assert_close(rms_norm(x, scale, EPS), expected, 1e-6)
