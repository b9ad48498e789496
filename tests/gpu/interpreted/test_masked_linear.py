"""Rows of chosen neurons times x: bit for bit the definition, as the CPU's kernel is; and near the plain reference."""

from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee_kernels import rows_reference
from hetero_ee_kernels.masked_linear import masked_linear
from hetero_ee_kernels.row_matrix import RowMatrix
from tests.gpu_support import DEVICE, Guarded, assert_same_bits
from tests.gpu_tiles import nmse
from tests.sparse_ffn_reference import FITTED, SETS, Rows, products

OPERATIONS = pytest.mark.parametrize(
    "operation", [masked_linear, rows_reference.masked_linear], ids=["kernel", "reference"]
)


class Case:
    """A matrix of this shape and the inputs of m tokens, all of which may skip."""

    def __init__(self, shape: tuple[int, int], m: int, *, has_bias: bool = True) -> None:
        random, (n, k) = np.random.default_rng(m), shape
        self.rows = Rows.random(shape, FITTED, -12, m)
        codes, scales = (torch.from_numpy(part).to(DEVICE) for part in self.rows.packed())
        self.matrix = RowMatrix(codes, scales, self.rows.exponent, self.rows.codebook, k)
        self.x, self.scores = random.standard_normal((m, k), np.float32), random.standard_normal((m, n), np.float32)
        self.bias = random.standard_normal(n, np.float32) if has_bias else None
        self.may_skip = np.ones(m, np.int32)

    def run(self, operation: Any = masked_linear, tokens: Any = slice(None), **more: Any) -> torch.Tensor:
        x, scores, may_skip = (on_device(part[tokens]) for part in (self.x, self.scores, self.may_skip))
        more = {"bias": on_device(self.bias), "may_skip": may_skip} | more
        found: torch.Tensor = operation(x, scores, self.matrix, **more)
        return found

    @np.errstate(all="ignore")
    def expected(self) -> torch.Tensor:
        """By the definition."""
        full = np.stack([products(x, self.rows) * np.float32(2.0**self.rows.exponent) for x in self.x])
        if self.bias is not None:
            full += self.bias
        is_needed = (self.scores > 0) | (self.may_skip[:, None] == 0)
        return torch.from_numpy(np.where(is_needed, full, np.float32(0))).to(DEVICE)


def on_device(part: Any) -> Any:
    return None if part is None else torch.tensor(part, device=DEVICE)


@pytest.mark.parametrize("name", SETS)
def test_awkward_sets_have_the_definitions_bits(name: str) -> None:
    case = Case((200, 64), 2, has_bias=name != "all")
    case.scores = (SETS[name](np.abs(case.scores)) - 1e-3).astype(np.float32)
    out = Guarded((2, 200))
    assert case.run(out=out.tensor) is out.tensor
    assert_same_bits(out.check(), case.expected())


@pytest.mark.parametrize(("shape", "m"), [((1, 32), 1), ((70, 200), 3), ((129, 100), 2)])
def test_bits_of_any_shape_are_the_definitions(shape: tuple[int, int], m: int) -> None:
    case = Case(shape, m, has_bias=m != 2)
    assert_same_bits(case.run(), case.expected())


@OPERATIONS
def test_tokens_that_may_not_skip_have_all_neurons(operation: Any) -> None:
    case, n_used = Case((50, 64), 3), torch.tensor([5], device=DEVICE)
    case.may_skip[1] = 0
    found, expected = case.run(operation, n_used=n_used), case.expected()
    assert nmse(found, expected) <= 1e-9 and torch.equal(found == 0, expected == 0)
    assert n_used.item() == 5 + np.count_nonzero(case.scores[[0, 2]] > 0)
    case.may_skip[:] = 0
    every = case.run(operation)
    assert_same_bits(every[1], found[1])
    assert_same_bits(operation(on_device(case.x), None, case.matrix, bias=on_device(case.bias)), every)


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    case = Case((33, 32), 8)
    case.may_skip[6:] = 0
    together = case.run()
    assert_same_bits(together, case.expected())
    for m in (1, 2, 5):
        assert_same_bits(case.run(tokens=slice(8 - m, 8)), together[8 - m :])


def test_more_tokens_than_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_ee_kernels.masked_linear.PASS_TOKENS", 4)
    case, n_used = Case((3, 32), 9), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    case.may_skip[::3] = 0
    assert_same_bits(case.run(n_used=n_used), case.expected())
    assert n_used.item() == np.count_nonzero(case.scores[case.may_skip != 0] > 0)


@OPERATIONS
def test_scores_may_become_the_output(operation: Any) -> None:
    case = Case((200, 64), 2)
    scores, more = on_device(case.scores), {"bias": on_device(case.bias), "may_skip": on_device(case.may_skip)}
    assert operation(on_device(case.x), scores, case.matrix, scores, **more) is scores
    assert nmse(scores, case.expected()) <= 1e-9 and torch.equal(scores == 0, case.expected() == 0)


@OPERATIONS
def test_rows_that_are_not_needed_are_not_read(operation: Any) -> None:
    """Whatever lies there."""
    case = Case((150, 64), 2)
    case.scores[:] = np.where(np.arange(150) % 2, 1, -1)
    expected = case.run(operation)
    case.matrix.scales[::2] = float("nan")
    assert_same_bits(case.run(operation), expected)


@OPERATIONS
def test_zeros_and_what_is_not_finite(operation: Any) -> None:
    """A score that is no number is none above 0; what x lacks of a number goes to the neurons it is multiplied with."""
    case = Case((40, 64), 3)
    case.scores[0, :20], case.scores[1, 3], case.scores[1, 4], case.scores[2, 5] = np.nan, np.inf, -np.inf, 0
    case.x[1, 7], case.x[2] = np.nan, 0
    found, expected = case.run(operation), case.expected()
    assert (found[0, :20] == 0).all() and found[1, 3].isnan() and found[1, 4] == 0
    assert torch.equal(found.isnan(), expected.isnan()) and nmse(found.nan_to_num(), expected.nan_to_num()) <= 1e-9
    if operation is masked_linear:
        assert_same_bits(found.nan_to_num(), expected.nan_to_num())


def test_wrong_operands_are_refused() -> None:
    case, n_used = Case((64, 96), 2), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="may_skip is needed"):
        case.run(may_skip=None, n_used=n_used)
    with pytest.raises(ValueError, match="bias is"):
        case.run(bias=on_device(case.x))
    with pytest.raises(ValueError, match="out is"):
        case.run(out=on_device(case.x))
    case.scores = case.scores[:, :32]
    with pytest.raises(ValueError, match="scores is"):
        case.run()
    case.x = case.x[:, :64]
    with pytest.raises(ValueError, match="x is"):
        case.run()
