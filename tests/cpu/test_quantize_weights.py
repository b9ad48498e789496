"""Kernels that quantize weights: the bytes of the definition in torch, for whatever a checkpoint holds."""

import numpy as np
import pytest
import torch

from hetero_ee.weights import codebook as codebooks
from hetero_ee.weights.codebook import Codebook, CompiledCodebook
from hetero_ee.weights.quantizers import quantize
from hetero_ee_cpu_ops.quantize_weights import encode_int4, fit_sums, search_scales

FITTED = (-32, -23, -18, -14, -10, -7, -4, -1, 1, 4, 7, 10, 14, 18, 22, 28)
UNEVEN = (-127, -126, -90, -60.5, -31.7, -12, -3, -0.2, -0.1, 0.01, 5, 9.3, 44, 70, 101, 126.9)
LINEAR = tuple(range(-8, 8))


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def with_changes(weight, *changes):
    for where, value in changes:
        weight.view(-1)[where::977] = value
    return weight


WEIGHTS = {
    "random": gaussian(37, 96),
    "long": gaussian(16, 4096, seed=1),
    "outliers": gaussian(48, 64, seed=2) * torch.where(gaussian(48, 64, seed=3) > 0.05, 30.0, 1.0),
    "constant": torch.full((20, 64), 0.3),
    "ternary": gaussian(64, 64, seed=4).sign() * (gaussian(64, 64, seed=5).abs() > 0.01),
    "one sign": gaussian(32, 64, seed=6).abs() + 1e-3,
    "zeros": torch.zeros(20, 64),
    "negative zeros": -torch.zeros(16, 32),
    "some zeros": gaussian(32, 128, seed=7) * (torch.arange(128) % 64 < 32),
    "tiny": gaussian(16, 64, seed=8) * 1e-36,
    "subnormal": gaussian(16, 64, seed=9) * 1e-42,
    "huge": gaussian(16, 64, seed=10) * 1e38,
    "of all sizes": gaussian(64, 64, seed=11) * 10.0 ** torch.linspace(-44, 38, 64)[:, None],
    "all sizes in a row": gaussian(32, 512, seed=12) * 10.0 ** torch.linspace(-44, 38, 16).repeat_interleave(32),
    "bf16": gaussian(32, 96, seed=13).bfloat16().float(),
    "infinite": with_changes(gaussian(64, 64, seed=14), (5, torch.inf), (300, -torch.inf)),
    "nan": with_changes(gaussian(64, 64, seed=15), (5, torch.nan), (301, torch.inf), (302, torch.nan)),
}


def numbers(tensor):
    """The bits, but for NaN's."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, 0.5), tensor).contiguous().numpy().tobytes()


def both(entries):
    values = torch.tensor(entries, dtype=torch.float32)
    return Codebook(values), CompiledCodebook(values)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", ["codebook", "search", "rtn"])
def test_a_store_has_the_same_bytes(monkeypatch, weight, name):
    found = []
    for least in (2**62, 0):
        monkeypatch.setattr(codebooks, "COMPILED_WEIGHTS", least)
        try:
            found.append(quantize(weight, name))
        except ValueError:  # no codebook can be fitted; checkpoints are checked before
            assert not weight.isfinite().all()
            found.append(None)
    plain, compiled = found
    if plain is None:
        assert compiled is None
        return
    assert plain.codebook == compiled.codebook and plain.exponent == compiled.exponent
    assert numbers(plain.scales) == numbers(compiled.scales)
    assert torch.equal(plain.tiles, compiled.tiles)


@pytest.mark.parametrize("entries", [FITTED, UNEVEN, LINEAR], ids=["fitted", "uneven", "linear"])
def test_every_step_has_the_same_bits(entries):
    plain, compiled = both(entries)
    for weight in WEIGHTS.values():
        groups = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 16)).view(-1, weight.shape[1] // 32, 32)
        mask = torch.ones(1, 1, 32)
        for n_steps in (1, 2, 4):
            scales = plain.scales(groups, mask, n_steps)
            assert numbers(compiled.scales(groups, mask, n_steps)) == numbers(scales)
        for expected, found in zip(plain.sums(groups, mask, 2), compiled.sums(groups, mask, 2), strict=True):
            assert numbers(found) == numbers(expected)
        inverse = codebooks.safe_inverse(scales)
        assert torch.equal(compiled.tiles(groups, inverse), plain.tiles(groups, inverse))


def test_midpoints_go_where_the_definition_sends_them():
    for entries in (FITTED, UNEVEN, LINEAR):
        plain, compiled = both(entries)
        targets = torch.cat([torch.arange(-300, 300) / 4, torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])])
        near = torch.cat(
            [targets, targets.nextafter(torch.tensor(torch.inf)), targets.nextafter(-torch.tensor(torch.inf))]
        )
        groups = torch.nn.functional.pad(near, (0, -len(near) % 512)).view(16, -1, 32)
        ones = torch.ones(groups.shape[:2])
        assert torch.equal(compiled.tiles(groups, ones), plain.tiles(groups, ones))


def test_groups_of_any_number_are_filled_up():
    plain, compiled = both(FITTED)
    groups = gaussian(21, 1, 32)
    assert torch.equal(compiled.scales(groups, torch.ones(1), 4), plain.scales(groups, torch.ones(1), 4))


def test_wrong_shapes_are_refused():
    table, factors = np.zeros(48, np.float32), np.ones(1, np.float32)
    for groups in (np.zeros((15, 32), np.float32), np.zeros((16, 31), np.float32)):
        for function in (search_scales, fit_sums):
            with pytest.raises(ValueError, match="do not fit"):
                function(groups, table, factors)
    with pytest.raises(ValueError, match="do not fit"):
        encode_int4(np.zeros((16, 2, 32), np.float32), np.zeros((16, 1), np.float32), table)
    with pytest.raises(ValueError, match="signature"):
        search_scales(np.zeros((16, 32)), table, factors)
