"""Quantizers: which of them errs less, and what holds for any matrix whatever its shape and magnitude."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import CHUNK_ELEMENTS, FITTED_LIMIT, MIN_EXPONENT, _rounded_codebook, quantize
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight

INT4 = ("rtn", "search", "nf4", "codebook")
NF4_CODEBOOK = (-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112)
ALL = (*INT4, "int8")
FP16_ROUNDING = 1.2 * 2**-10  # two scales, each rounded by up to 2^-11 after its error was computed
SHAPES = [(1, 1), (1, 40), (40, 1), (16, 32), (17, 33), (48, 76), (131, 48)]


def gaussian(n_rows: int, n_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(n_rows, n_columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def outlier_heavy(n_rows: int, n_columns: int) -> Tensor:
    """One weight in 300 is twenty times as large as its neighbours."""
    weight = gaussian(n_rows, n_columns)
    chance = torch.rand(n_rows, n_columns, generator=torch.Generator().manual_seed(9))
    return torch.where(chance < 1 / 300, weight * 20, weight)


def nmse(weight: Tensor, quantized: TileWeight, columns: Tensor | None = None) -> float:
    """Squared error relative to the weight's own square, each column counted by its factor."""
    h = torch.ones(weight.shape[1]) if columns is None else columns
    error = (quantized.dequantize().double() - weight.double()).square() * h
    return float(error.sum() / (weight.double().square() * h).sum())


def stored(quantized: TileWeight) -> tuple[bytes, bytes, int, tuple[int, ...] | None]:
    """Everything that a store would hold of it."""
    tiles, scales = quantized.tiles.numpy().tobytes(), quantized.scales.numpy().tobytes()
    return tiles, scales, quantized.exponent, quantized.codebook


def check_valid(weight: Tensor, quantized: TileWeight) -> None:
    """Shapes, finite scales, a proper codebook, and every entry the nearest one at the scale as it is stored."""
    n_rows, n_columns = layout.padded_shape(*weight.shape)
    grid = (n_rows // 16, n_columns // 32)
    assert quantized.shape == tuple(weight.shape) and quantized.scales.shape == (*grid, 16)
    assert quantized.scales.dtype == torch.float16 and bool(quantized.scales.isfinite().all())
    assert MIN_EXPONENT <= quantized.exponent <= 112  # finite times any scale
    if quantized.codebook is None:
        assert quantized.tiles.shape == (*grid, 512) and quantized.tiles.dtype == torch.int8
        entries = torch.arange(-127, 128)
    else:
        assert quantized.tiles.shape == (*grid, 256) and quantized.tiles.dtype == torch.uint8
        assert len(quantized.codebook) == 16 and list(quantized.codebook) == sorted(set(quantized.codebook))
        assert quantized.codebook[0] >= -128 and quantized.codebook[-1] <= 127
        if quantized.codebook != NF4_CODEBOOK:
            assert max(map(abs, quantized.codebook)) <= FITTED_LIMIT
        entries = torch.tensor(quantized.codebook)
    scales = layout.unpack_scales(quantized.scales).double() * 2.0**quantized.exponent
    scales = scales.repeat_interleave(32, dim=1)[: weight.shape[0], : weight.shape[1]]
    dense = quantized.dequantize()
    assert bool(dense.isfinite().all())
    error = (dense.double() - weight.double()).abs()
    least = (weight.double()[:, :, None] - scales[:, :, None] * entries).abs().amin(-1)
    rounding = 2e-5 * scales.abs()  # of a quotient of up to 128, near a tie
    if quantized.codebook == NF4_CODEBOOK:
        rounding += scales.abs()  # bitsandbytes chose by its table, of which each entry is up to half a step away
    assert bool((error <= least + rounding).all())


@pytest.mark.parametrize("make", [gaussian, outlier_heavy])
def test_search_beats_rounding_and_a_fitted_codebook_beats_search(make: Any) -> None:
    weight = make(128, 512)
    rtn, search, nf4, codebook, int8 = (nmse(weight, quantize(weight, name)) for name in ALL)
    assert int8 < codebook < min(search, nf4) and search < rtn
    assert int8 < (5e-5 if make is gaussian else 2e-4)
    assert max(rtn, nf4) < 0.02


def test_search_is_never_worse_than_rounding_in_any_group() -> None:
    weight = outlier_heavy(64, 128)
    search, rtn = (
        (quantize(weight, name).dequantize() - weight).view(64, 4, 32).norm(dim=-1) for name in ("search", "rtn")
    )
    assert bool((search <= rtn + FP16_ROUNDING * weight.view(64, 4, 32).norm(dim=-1)).all())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(name: str, shape: tuple[int, int]) -> None:
    weight = gaussian(*shape)
    quantized = quantize(weight, name)
    check_valid(weight, quantized)
    assert nmse(weight, quantized) < 0.02


@pytest.mark.parametrize("name", ALL)
def test_padding_changes_nothing(name: str) -> None:
    """Zeros up to whole tiles give the same bytes, unless they have a say in a codebook without a zero."""
    weight = gaussian(20, 40)
    plain = quantize(weight, name)
    assert stored(quantize(torch.nn.functional.pad(weight, (0, 0, 0, 12)), name)) == stored(plain)
    if name != "codebook":
        assert stored(quantize(torch.nn.functional.pad(weight, (0, 24, 0, 12)), name)) == stored(plain)


def test_a_codebook_spends_no_entry_on_padding() -> None:
    weight = gaussian(40, 1)
    assert 0 not in (quantize(weight, "codebook").codebook or ())
    assert 0 in (quantize(torch.nn.functional.pad(weight, (0, 31)), "codebook").codebook or ())


@pytest.mark.parametrize("name", ALL)
def test_zeros(name: str) -> None:
    nothing = torch.zeros(20, 40)
    quantized = quantize(nothing, name)
    check_valid(nothing, quantized)
    assert quantized.exponent == 0 and torch.equal(quantized.dequantize(), nothing)
    weight = gaussian(20, 96)
    weight[3, 32:64] = weight[7] = 0
    quantized = quantize(weight, name)
    check_valid(weight, quantized)
    assert torch.equal(quantized.dequantize()[weight == 0], torch.zeros(32 + 96))


@pytest.mark.parametrize("name", ALL)
def test_an_outlier_costs_only_its_own_group(name: str) -> None:
    weight = gaussian(48, 64)
    weight[5, 40] = -200.0  # ten thousand times its neighbours
    quantized = quantize(weight, name)
    check_valid(weight, quantized)
    assert quantized.dequantize()[5, 40].item() == pytest.approx(-200, rel=5e-3)
    error = (quantized.dequantize() - weight).square()
    error[5, 32:] = 0
    assert error.sum() / weight.square().sum() < 0.02


@pytest.mark.parametrize("name", ALL)
def test_tiny_weights_keep_their_precision(name: str) -> None:
    """1e-7 / 8 is far below fp16's normal numbers; the tensor's exponent lifts it."""
    weight = gaussian(32, 64) * 5e-6
    quantized = quantize(weight, name)
    check_valid(weight, quantized)
    assert nmse(weight, quantized) < 0.01
    assert bool((quantized.scales.abs() >= 2.0**-14).all())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("power", [-100, -60, -17, 3, 60, 120])
def test_a_power_of_two_changes_the_exponent_alone(name: str, power: int) -> None:
    weight = gaussian(20, 70)
    plain, scaled = (quantize(w, name) for w in (weight, weight * 2.0**power))
    assert stored(scaled)[:2] == stored(plain)[:2] and scaled.codebook == plain.codebook
    assert scaled.exponent == plain.exponent + power


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("largest", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_the_ends_of_the_number_range(name: str, largest: float) -> None:
    weight = gaussian(8, 40)
    weight = (weight / weight.abs().max()).double().mul(largest).float()
    quantized = quantize(weight, name)
    assert bool(quantized.scales.isfinite().all() and quantized.dequantize().isfinite().all())
    assert MIN_EXPONENT <= quantized.exponent <= 112  # finite times any scale
    if largest > 1e-38:
        assert nmse(weight, quantized) < 0.01


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sign", [-1, 1])
def test_weights_of_one_sign(name: str, sign: int) -> None:
    weight = sign * (gaussian(32, 64).abs() + 0.001)
    quantized = quantize(weight, name)
    check_valid(weight, quantized)
    assert nmse(weight, quantized) < 0.01


@pytest.mark.parametrize("name", ALL)
def test_few_distinct_weights(name: str) -> None:
    """Constant, binary and ternary tensors leave most of a codebook without weights to fit."""
    signs = torch.randint(-1, 2, (32, 64), generator=torch.Generator().manual_seed(3)).float()
    for weight in (torch.full((32, 64), 0.3), torch.where(signs == 0, 1, signs) * 0.7, signs * 1.5):
        quantized = quantize(weight, name)
        check_valid(weight, quantized)
        assert nmse(weight, quantized) < (0.01 if name == "rtn" else 1e-6)  # rtn's 7 is not -8 turned round


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type(dtype: torch.dtype) -> None:
    weight = gaussian(20, 40).to(dtype)
    for name in ALL:
        assert stored(quantize(weight, name)) == stored(quantize(weight.float(), name))


@pytest.mark.parametrize("name", ALL)
def test_same_bytes_again_and_for_any_workers(name: str) -> None:
    weight = gaussian(7 * 16 + 5, CHUNK_ELEMENTS // 32)  # four chunks, the last one short
    first = stored(quantize(weight, name))
    assert stored(quantize(weight, name)) == first
    with ThreadPoolExecutor(3) as pool:
        assert stored(quantize(weight, name, pool.map)) == first


@pytest.mark.parametrize("name", ALL)
def test_the_weight_is_not_changed(name: str) -> None:
    weight = gaussian(17, 40)
    before = weight.clone()
    quantize(weight, name)
    assert torch.equal(weight, before)


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation makes; a view of an argument counts as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.n_bytes = max(self.n_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("name", ALL)
def test_memory_beside_weight_and_tiles_is_a_chunk(name: str) -> None:
    """An embedding of 2 GB in fp32 must not need 8: no intermediate is larger than a chunk or the result."""
    weight = gaussian(32, CHUNK_ELEMENTS // 4)  # two chunks of 16 rows, each larger than a sample for a codebook
    with LargestResult() as largest:
        quantized = quantize(weight, name)
    assert 0 < largest.n_bytes <= max(weight.nbytes // 2, quantized.n_bytes)


def test_a_codebook_is_fitted_on_all_columns() -> None:
    """Widths are powers of two; a sample with such a stride would see the first group of columns only."""
    weight = gaussian(4096, 128)
    weight[:, 32:] = weight[:, 32:].sign() * 0.02 * (1 + torch.arange(96) % 3)  # three levels in all groups but that
    elsewhere = (torch.arange(128) >= 32).float()
    assert nmse(weight, quantize(weight, "codebook"), elsewhere) < 2e-4


def test_entries_that_round_to_one_value_are_kept_apart() -> None:
    for entries in (
        torch.tensor([-127.0] + [126.9] * 15),
        torch.tensor([-127.0] * 15 + [126.9]),
        torch.tensor([-1e-3] * 8 + [1.0] * 8),
        torch.linspace(-128, 127, 16),
    ):
        codebook = _rounded_codebook(entries, torch.ones(16))
        assert len(set(codebook)) == 16 and list(codebook) == sorted(codebook)
        assert codebook[0] >= -FITTED_LIMIT and codebook[-1] <= FITTED_LIMIT


def test_entries_are_rounded_where_that_costs_least() -> None:
    """Twenty is the one largest entry of 19.2 .. 32 at which all of these are whole numbers."""
    entries = torch.tensor([-20, -17, -13, -11, -9, -7, -5, -2, 1, 3, 6, 8, 10, 12, 15, 19.0])
    assert _rounded_codebook(entries * 6.35, torch.ones(16)) == tuple(entries.int().tolist())


def test_rtn_and_search_use_the_linear_codebook() -> None:
    for name in ("rtn", "search"):
        assert quantize(gaussian(16, 32), name).codebook == LINEAR_CODEBOOK
    with pytest.raises(KeyError):
        quantize(gaussian(16, 32), "fp3")


@st.composite
def strange_matrices(draw: st.DrawFn) -> Tensor:
    """Sparse, spiky, constant, one-signed, of wildly different magnitudes from group to group."""
    n_rows, n_columns = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    weight = gaussian(n_rows, n_columns, draw(st.integers(0, 1000))) * 2.0 ** draw(st.integers(-80, 80))
    if draw(st.booleans()):
        weight[draw(st.integers(0, n_rows - 1))] *= 10.0 ** draw(st.integers(-9, 9))
    if draw(st.booleans()):
        weight[:, draw(st.integers(0, n_columns - 1))] = 0
    if draw(st.booleans()):
        weight[weight.abs() < weight.abs().quantile(draw(st.sampled_from([0.3, 0.99])))] = 0
    if draw(st.booleans()):
        weight = weight.abs() * draw(st.sampled_from([-1, 1]))
    if draw(st.booleans()):
        weight = weight.sign() * weight.abs().max()
    return weight


@given(strange_matrices(), st.sampled_from(ALL))
@settings(max_examples=60, deadline=None)
def test_any_matrix_is_stored_validly(weight: Tensor, name: str) -> None:
    quantized = quantize(weight, name)
    check_valid(weight, quantized)
    if name == "search" and bool(weight.any()):
        rtn = nmse(weight, quantize(weight, "rtn"))
        assert nmse(weight, quantized) ** 0.5 <= rtn**0.5 + FP16_ROUNDING
