"""The tile matmul against float64 on the very activations it quantized, and the rule that a row's bits are its own.

The bound on quantized activations (1e-9) is the one that catches defects: 24 seeded ones below must each exceed it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.weight import TileWeight
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from tests.cpu_support import GuardedAllocations

KINDS = ("rtn", "codebook", "wide", "int8", "zeros", "int5", "int5 zeros", "int6")
WIDE = (-128, -97, -70, -54, -40, -27, -16, -5, 0, 9, 28, 40, 54, 70, 90, 127)  # beyond what is fitted, as NF4's
QUANTIZED_BOUND, GAUSSIAN_BOUND, OUTLIER_BOUND = 1e-9, 1e-4, 2e-4
SHAPES = ((16, 32), (17, 33), (250, 500), (48, 1056), (1, 32), (131, 96))


@dataclass
class Case:
    """One product: weight, activations x (m, K)."""

    weight: TileWeight
    x: Any

    @classmethod
    def random(cls, kind: str, shape: tuple[int, int], m: int, seed: int = 0, n_terms: int = 1) -> "Case":
        torch.manual_seed(seed)
        quantizer = {"wide": "rtn", "zeros": "rtn"}.get(kind, kind.removesuffix(" zeros"))
        weight = quantize(torch.randn(shape) * 0.02, quantizer)
        weight = replace(weight, codebook=WIDE) if kind == "wide" else weight
        if kind.endswith("zeros"):
            scales = layout.unpack_scales(weight.scales)
            weight = replace(weight, scales=layout.pack_scales(scales, (torch.randn(scales.shape) * 5).half()))
        weight = replace(weight, n_terms=n_terms)
        return cls(weight, np.random.default_rng(seed).standard_normal((m, shape[1]), np.float32))

    def matrix(self) -> TileMatrix:
        w = self.weight
        return TileMatrix(w.tiles.numpy(), w.scales.numpy(), w.exponent, w.codebook, w.n_terms)

    def reference(self, x: Any) -> Any:
        return x.astype(np.float64) @ self.weight.dequantize().double().numpy().T

    def run(self, operation: Any) -> Any:
        return operation(self.x, self.matrix())[:, : self.weight.n_rows]


def quantized(x: Any, n_terms: int = 1) -> Any:
    """The values that int8 per row and group of 32 stands for, in float64; written apart from the kernel."""
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    scaled = groups * np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    unit = largest / np.float32(127)
    values = np.rint(scaled) * unit.astype(np.float64)
    if n_terms == 2:
        values += np.rint((scaled - np.rint(scaled)) * np.float32(254)) * (unit / np.float32(254)).astype(np.float64)
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def nmse(found: Any, expected: Any) -> float:
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


@pytest.fixture(scope="module")
def matmul() -> Matmul:
    return Matmul(ThreadPool(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sample(3)
def test_products_equal_float64_on_the_quantized_activations(matmul: Matmul, kind: str, shape: tuple[int, int]) -> None:
    for m in range(1, 18):
        case = Case.random(kind, shape, m, seed=m)
        assert nmse(case.run(matmul), case.reference(quantized(case.x))) <= QUANTIZED_BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_quantizing_activations_costs_what_is_allowed(matmul: Matmul, kind: str) -> None:
    case = Case.random(kind, (256, 1024), 16)
    assert nmse(case.run(matmul), case.reference(case.x)) <= GAUSSIAN_BOUND
    case.x[:, ::100] *= 20  # outlier features, as large models have them
    assert nmse(case.run(matmul), case.reference(case.x)) <= OUTLIER_BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_two_terms_are_16_bits(kind: str) -> None:
    """The second term's entries span int8, so that sums at the ends of their range count too."""
    operation = Matmul(ThreadPool(2))
    for shape, ms in (((40, 96), range(1, 19)), ((16, 9000), (131,))):
        case = Case.random(kind, shape, max(ms), n_terms=2)
        case.x[:, ::100] *= 20
        whole = case.run(operation)
        assert nmse(whole, case.reference(quantized(case.x, 2))) <= QUANTIZED_BOUND
        assert nmse(whole, case.reference(case.x)) <= 1e-4 * OUTLIER_BOUND
        for m in ms:
            assert np.array_equal(replace(case, x=case.x[:m]).run(operation), whole[:m])
    ids = np.array([7, 0, 15], np.int64)
    assert np.array_equal(operation.sliced(case.x[:3], case.matrix(), ids), whole[:3, ids])
    case.x[:3, 5] = 0, np.nan, np.inf
    assert np.isnan(case.run(operation)).all(1).tolist() == [False, True, True] + [False] * 128


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_batch_or_threads(kind: str) -> None:
    """Sizes on both sides of every width and of the size from which work is shared."""
    random = np.random.default_rng(1)
    operations = [Matmul(ThreadPool(threads)) for threads in (1, 2, 3)]
    for shape in ((40, 64), (1040, 320)):
        case = Case.random(kind, shape, 40)
        alone = np.concatenate([operations[0](row[None], case.matrix()) for row in case.x])
        for _ in range(170):  # times 2 shapes and 4 kinds: over 1,000 cases
            chosen = random.permutation(40)[: random.integers(1, 41)]
            product = operations[random.integers(3)](np.ascontiguousarray(case.x[chosen]), case.matrix())
            assert np.array_equal(product, alone[chosen])


@pytest.mark.parametrize("kind", KINDS)
def test_passes_of_many_rows_give_the_same_bits(kind: str) -> None:
    """Rows of whole passes, of a last one that no width divides, and of shapes whose passes are short."""
    operation = Matmul(ThreadPool(2))
    for shape, m in (((40, 64), 531), ((16, 9000), 131)):
        case = Case.random(kind, shape, m)
        parts = [operation(case.x[at : at + 37], case.matrix()) for at in range(0, m, 37)]
        assert np.array_equal(operation(case.x, case.matrix()), np.concatenate(parts))
    assert operation(case.x[:0], case.matrix()).shape == (0, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_outputs_have_the_bits_of_the_whole_product(matmul: Matmul, kind: str) -> None:
    case = Case.random(kind, (131, 96), 5)
    whole = matmul(case.x, case.matrix())
    ids = np.array([130, 0, 7, 7, 16, 15, 64], np.int64)
    assert np.array_equal(matmul.sliced(case.x, case.matrix(), ids), whole[:, ids])
    assert np.array_equal(matmul.sliced(case.x[3:4], case.matrix(), ids[:1]), whole[3:4, ids[:1]])
    for wrong in (np.array([144]), np.array([-1]), np.array([], np.int64), np.array([1], np.int32), ids[None]):
        with pytest.raises(ValueError, match="Ids are"):
            matmul.sliced(case.x, case.matrix(), wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_from_a_row_block_on_have_the_bits_of_the_whole_product(matmul: Matmul, kind: str) -> None:
    case = Case.random(kind, (131, 96), 5)
    whole = matmul(case.x, case.matrix())
    for row in (0, 16, 128):
        assert np.array_equal(matmul.rows(case.x, case.matrix(), row, 131 - row), whole[:, row:])
    assert np.array_equal(matmul.rows(case.x, case.matrix(), 32, 48), whole[:, 32:80])
    for wrong in (8, -16, 144):
        with pytest.raises(ValueError, match=f"Rows {wrong}..{wrong + 15} are not"):
            matmul.rows(case.x, case.matrix(), wrong, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_beside_the_output(matmul: Matmul, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array the operation allocates lies between guard bytes that must survive."""
    allocated = GuardedAllocations()
    for shape in SHAPES:
        case = Case.random(kind, shape, 11)
        expected = matmul(case.x, case.matrix())
        with monkeypatch.context() as patch:
            patch.setattr("hetero_ee_cpu_ops.matmul.np.empty", allocated.empty)
            assert np.array_equal(matmul(case.x, case.matrix()), expected)
    assert len(allocated.arrays) == 2 * len(SHAPES)
    allocated.check()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_zeros_and_nans(matmul: Matmul, kind: str) -> None:
    case = Case.random(kind, (32, 96), 3)
    case.x[0] = 0
    case.x[1, 32:64] = 0
    case.x[2, 5] = np.nan
    product = case.run(matmul)
    assert not product[0].any()
    assert nmse(product[1], case.reference(quantized(case.x[1:2]))[0]) <= QUANTIZED_BOUND
    assert np.isnan(product[2]).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e15])
def test_very_small_and_very_large_activations(matmul: Matmul, scale: float) -> None:
    case = Case.random("codebook", (32, 64), 2)
    case.x *= np.float32(scale)
    assert nmse(case.run(matmul) / scale, case.reference(quantized(case.x)) / scale) <= QUANTIZED_BOUND


def test_wrong_operands_are_refused(matmul: Matmul) -> None:
    case = Case.random("rtn", (16, 64), 1)
    tiles, scales = case.weight.tiles.numpy(), case.weight.scales.numpy()
    for wrong in (case.x.astype(np.float64), case.x[:, :32], np.zeros((2, 128), np.float32)[:, ::2], case.x[0]):
        with pytest.raises(ValueError, match="Activations are"):
            matmul(wrong, case.matrix())
    for arguments in (
        (tiles[:, :, :100], scales, 0, case.weight.codebook),
        (tiles, scales.astype(np.float32), 0, case.weight.codebook),
        (tiles, scales[:, :1], 0, case.weight.codebook),
        (tiles, scales, 0, None),
        (tiles, np.concatenate([scales, scales], 2), 0, WIDE),
        (tiles, np.concatenate([scales, scales, scales], 2), 0, case.weight.codebook),
        (np.asfortranarray(tiles), scales, 0, case.weight.codebook),
    ):
        with pytest.raises(ValueError, match=r"[Tt]iles|[Ss]cales"):
            TileMatrix(*arguments)


# Defects as they happen in such kernels, each imitated on the real kernel's operands or result.


def _tiles(case: Case, change: Callable[[Any], Any]) -> Case:
    w = case.weight
    changed = torch.from_numpy(np.ascontiguousarray(change(w.tiles.numpy().copy())))
    return Case(TileWeight(changed, w.scales, w.exponent, w.codebook, w.n_rows, w.n_columns), case.x)


def _scales(case: Case, change: Callable[[Any], Any]) -> Case:
    w = case.weight
    changed = torch.from_numpy(np.ascontiguousarray(change(w.scales.numpy().copy())))
    return Case(TileWeight(w.tiles, changed, w.exponent, w.codebook, w.n_rows, w.n_columns), case.x)


def _other(case: Case, exponent: int = 0, entry: int = 0, shift: int = 0) -> Case:
    w = case.weight
    assert w.codebook is not None
    codebook = tuple(v + shift + (entry if i == 11 else 0) for i, v in enumerate(w.codebook))
    return Case(TileWeight(w.tiles, w.scales, w.exponent + exponent, codebook, w.n_rows, w.n_columns), case.x)


def _lines(tiles: Any) -> Any:
    return tiles.reshape(*tiles.shape[:2], 4, 16, 4)


def _x(case: Case, change: Callable[[Any], Any]) -> Case:
    return Case(case.weight, np.ascontiguousarray(change(case.x.copy()).astype(np.float32)))


def _zeroed(array: Any, index: Any) -> Any:
    array[index] = 0
    return array


def _flipped(array: Any, index: Any) -> Any:
    array[index] *= -1
    return array


OPERAND_DEFECTS: dict[str, Callable[[Case], Case]] = {
    "nibbles swapped": lambda c: _tiles(c, lambda t: (t >> 4) | (t << 4)),
    "lines in reverse": lambda c: _tiles(c, lambda t: _lines(t)[:, :, ::-1].reshape(t.shape)),
    "two lines swapped": lambda c: _tiles(c, lambda t: _lines(t)[:, :, [1, 0, 2, 3]].reshape(t.shape)),
    "rows of a tile off by one": lambda c: _tiles(c, lambda t: np.roll(_lines(t), 1, 3).reshape(t.shape)),
    "bytes of a word in reverse": lambda c: _tiles(c, lambda t: _lines(t)[..., ::-1].reshape(t.shape)),
    "high nibble without its mask": lambda c: _tiles(c, lambda t: t | ((t & 8) << 1)),
    "next group's tile": lambda c: _tiles(c, lambda t: np.roll(t, 1, 1)),
    "next block's tile": lambda c: _tiles(c, lambda t: np.roll(t, 1, 0)),
    "a neighbour row's scale": lambda c: _scales(c, lambda s: np.roll(s, 1, 2)),
    "the next group's scale": lambda c: _scales(c, lambda s: np.roll(s, 1, 1)),
    "the sign of a scale lost": lambda c: _scales(c, np.abs),
    "one scale for the whole tile": lambda c: _scales(c, lambda s: np.broadcast_to(s[..., :1], s.shape)),
    "exponent off by one": lambda c: _other(c, exponent=1),
    "one codebook entry off by one": lambda c: _other(c, entry=1),
    "offset forgotten": lambda c: _other(c, shift=8),
    "offset off by one": lambda c: _other(c, shift=1),
    "last group left out": lambda c: _x(c, lambda x: _zeroed(x, np.s_[:, -32:])),
    "last column left out": lambda c: _x(c, lambda x: _zeroed(x, np.s_[:, -1])),
    "first column left out": lambda c: _x(c, lambda x: _zeroed(x, np.s_[:, 0])),
    "a sign lost in one column": lambda c: _x(c, lambda x: _flipped(x, np.s_[:, 7])),
    "activations cut instead of rounded": lambda c: _x(c, lambda x: np.trunc(x * 64) / 64),
    "rows of activations swapped": lambda c: _x(c, lambda x: x[::-1]),
}
RESULT_DEFECTS: dict[str, Callable[[Any], Any]] = {
    "last block not written": lambda y: _zeroed(y, np.s_[:, -8:]),
    "outputs off by one": lambda y: np.roll(y, 1, 1),
    "a row written twice": lambda y: y[[0, 0, *range(2, len(y))]],
    "sums kept in 16 bits of mantissa": lambda y: y.view(np.int32).__and__(-65536).view(np.float32),
}


ZEROS_DEFECTS: dict[str, Callable[[Any], Any]] = {
    "zero points forgotten": lambda s: _zeroed(s, np.s_[:, :, 16:]),
    "one row's zero point forgotten": lambda s: _zeroed(s, np.s_[:, :, 21]),
    "the sign of zero points lost": lambda s: _flipped(s, np.s_[:, :, 16:]),
    "a neighbour row's zero point": lambda s: np.concatenate([s[..., :16], np.roll(s[..., 16:], 1, 2)], 2),
    "the next group's zero points": lambda s: np.concatenate([s[..., :16], np.roll(s[..., 16:], 1, 1)], 2),
    "scales and zero points exchanged": lambda s: np.roll(s, 16, 2),
    "one zero point for the whole tile": lambda s: np.concatenate([s[..., :16], np.repeat(s[..., 16:17], 16, 2)], 2),
    "zero points off by a rounding of fp16": lambda s: _turned_on(s, np.s_[:, :, 16:]),
}


def _turned_on(array: Any, index: Any) -> Any:
    bits = array.view(np.uint16)
    bits[index] += 1
    return array


@pytest.mark.parametrize("name", ZEROS_DEFECTS)
@pytest.mark.parametrize("m", [1, 5, 12])
def test_seeded_defects_of_zero_points_are_caught(matmul: Matmul, name: str, m: int) -> None:
    case = Case.random("zeros", (72, 160), m)
    expected = case.reference(quantized(case.x))
    assert nmse(case.run(matmul), expected) <= QUANTIZED_BOUND
    assert nmse(_scales(case, ZEROS_DEFECTS[name]).run(matmul), expected) > QUANTIZED_BOUND


def test_zero_points_of_0_change_no_bit(matmul: Matmul) -> None:
    """Tiles with and without are two kernels of one arithmetic."""
    for m in range(1, 14):
        case = Case.random("rtn", (72, 1056), m)
        scales = layout.unpack_scales(case.weight.scales)
        with_zeros = replace(case.weight, scales=layout.pack_scales(scales, torch.zeros_like(scales)))
        assert np.array_equal(case.run(matmul), Case(with_zeros, case.x).run(matmul))


@pytest.mark.parametrize("name", [*OPERAND_DEFECTS, *RESULT_DEFECTS])
def test_seeded_defects_are_caught(matmul: Matmul, name: str) -> None:
    case = Case.random("codebook", (72, 160), 5)
    expected = case.reference(quantized(case.x))
    assert nmse(case.run(matmul), expected) <= QUANTIZED_BOUND
    if name in OPERAND_DEFECTS:
        found = OPERAND_DEFECTS[name](case).run(matmul)
    else:
        found = RESULT_DEFECTS[name](case.run(matmul).copy())
    assert nmse(found, expected) > QUANTIZED_BOUND
