"""Embedding lookup: bit-equal to TileWeight.rows."""

import numpy as np
import pytest
import torch

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight
from hetero_ee_cpu_ops.embed import embed_int4, embed_int8
from tests.cpu_support import Guarded, assert_same_bits


def weight(seed, *, int4):
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 70)), int(rng.integers(1, 200))
    n_padded, k_padded = layout.padded_shape(n, k)
    scales = torch.from_numpy((rng.normal(size=(n_padded, k_padded // 32)) * 0.1).astype(np.float16))
    scales[:, :1] = 3e-7 if seed % 5 == 0 else scales[:, :1]  # subnormal fp16
    scales[0] = 0.0
    codebook = LINEAR_CODEBOOK if seed % 2 else tuple(sorted(int(v) for v in rng.choice(256, 16, replace=False) - 128))
    exponent = int(rng.integers(-12, 5))
    if int4:
        codes = torch.from_numpy(rng.integers(0, 16, (n_padded, k_padded), dtype=np.uint8))
        return rng, TileWeight(layout.pack_int4(codes), layout.pack_scales(scales), exponent, codebook, n, k)
    values = torch.from_numpy(rng.integers(-128, 128, (n_padded, k_padded), dtype=np.int8))
    return rng, TileWeight(layout.pack_int8(values), layout.pack_scales(scales), exponent, None, n, k)


def looked_up(matrix, ids, out=None):
    tiles, scales = matrix.tiles.numpy(), matrix.scales.numpy().view(np.uint16)
    if matrix.codebook is None:
        return embed_int8(tiles, scales, 2.0**matrix.exponent, matrix.shape, ids, out)
    return embed_int4(tiles, scales, 2.0**matrix.exponent, np.array(matrix.codebook, np.int8), matrix.shape, ids, out)


@pytest.mark.parametrize("int4", [True, False])
def test_bits_are_the_reference_s(int4):
    for seed in range(100):
        rng, matrix = weight(seed, int4=int4)
        ids = rng.integers(0, matrix.n_rows, int(rng.integers(1, 18)))
        out = Guarded((len(ids), matrix.n_columns), np.float32)
        assert looked_up(matrix, ids, out.array) is out.array
        out.check()
        assert_same_bits(out.array, matrix.rows(torch.from_numpy(ids)).numpy())
        for row, token in enumerate(ids):
            assert_same_bits(looked_up(matrix, np.array([token]))[0], out.array[row])


@pytest.mark.parametrize("int4", [True, False])
def test_wrong_arguments_are_refused(int4):
    _, matrix = weight(3, int4=int4)
    good = np.array([0])
    out = Guarded((1, matrix.n_columns), np.float32)
    for ids, target in (
        (np.array([matrix.n_rows]), out.array), (np.array([-1]), out.array), (np.array([0, 0]), out.array),
        (good.astype(np.int32), out.array), (good, np.zeros((1, matrix.n_columns + 1), np.float32)),
        (good, np.zeros((1, matrix.n_columns))),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            looked_up(matrix, ids, target)


@pytest.mark.parametrize("bug", ["nibble", "neighbour's scale", "row", "exponent", "codebook"])
def test_bits_catch(bug):
    _, matrix = weight(2, int4=True)
    ids = np.arange(matrix.n_rows)
    expected = matrix.rows(torch.from_numpy(ids)).numpy()
    changes = {
        "nibble": {"tiles": (matrix.tiles >> 4) | (matrix.tiles << 4)},
        "neighbour's scale": {"scales": matrix.scales.roll(1, 2)},
        "row": {"tiles": matrix.tiles.roll(4, 2)},
        "exponent": {"exponent": matrix.exponent + 1},
        "codebook": {"codebook": LINEAR_CODEBOOK},
    }[bug]
    fields = {name: getattr(matrix, name) for name in TileWeight.__dataclass_fields__} | changes
    with pytest.raises(AssertionError):
        assert_same_bits(looked_up(TileWeight(**fields), ids), expected)
