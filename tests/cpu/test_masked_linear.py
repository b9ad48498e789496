"""The masked product of rows against its definition in plain numpy, bit for bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.neurons.masked_linear import MaskedLinear
from tests.cpu_support import GuardedAllocations, assert_same_bits, teams
from tests.sparse_ffn_reference import FITTED, LINEAR, SETS, Rows, masked_reference

SHAPES = ((64, 64), (65, 32), (200, 96), (1, 32), (300, 1056))
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 23)


class Case:
    """A matrix and the inputs of m tokens; `share` of the scores are positive."""

    def __init__(self, shape: tuple[int, int], m: int, seed: int = 0, share: float = 0.3) -> None:
        random, (n, k) = np.random.default_rng(seed), shape
        self.rows = Rows.random(shape, LINEAR if seed % 2 else FITTED, -12, seed)
        self.matrix = self.rows.matrix()
        self.x = random.standard_normal((m, k), np.float32)
        self.scores = random.random((m, n), np.float32) - np.float32(1 - share)
        self.bias = random.standard_normal(n, np.float32)
        self.skips = np.ones(m, np.bool_)

    def check(self, operation: MaskedLinear, bias: Any = None, may_skip: Any = None) -> Any:
        found = operation(self.x, self.scores, self.matrix, bias, may_skip)
        assert_same_bits(found, masked_reference(self.x, self.scores, self.rows, bias, may_skip))
        return found


@pytest.fixture(scope="module")
def operation() -> MaskedLinear:
    return MaskedLinear(ThreadPool(1))


@pytest.fixture(scope="module")
def operations() -> Iterator[list[MaskedLinear]]:
    with teams() as pools:
        yield [MaskedLinear(pool) for pool in pools]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sample(1)
def test_bits_are_those_of_the_definition(operation: MaskedLinear, shape: tuple[int, int]) -> None:
    for m in COUNTS:
        case = Case(shape, m, m, (1, 0.5, 0.1)[m % 3])
        bias = case.bias if m % 2 else None
        case.check(operation, bias, case.skips)
        case.skips[m // 2] = False  # one that may not skip among others
        case.check(operation, bias, case.skips)
        case.check(operation, bias)


def test_bits_are_those_of_the_definition_in_passes(operations: list[MaskedLinear]) -> None:
    case = Case((65, 32), 300, share=0.01)
    case.skips[:3] = False  # of the first pass alone
    case.check(operations[1], case.bias, case.skips)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("m", [1, 5])
def test_awkward_sets_have_their_bits(operation: MaskedLinear, name: str, m: int) -> None:
    for shape in SHAPES[1:3]:
        case = Case(shape, m)
        case.scores = SETS[name](np.abs(case.scores) + 1).astype(np.float32)
        case.check(operation, case.bias, case.skips)
        case.scores[case.scores == 0] = -1
        case.check(operation, None, case.skips)


def test_scores_that_are_no_numbers_or_barely_positive(operation: MaskedLinear) -> None:
    case = Case((200, 96), 3)
    case.scores[:, ::5] = np.nan
    case.scores[:, 1::5] = 1e-45
    case.scores[:, 2::5] = -0.0
    case.scores[:, 3::5] = np.inf
    found = case.check(operation, case.bias, case.skips)
    assert not found[:, ::5].any() and not found[:, 2::5].any() and found[:, 1::5].any() and found[:, 3::5].any()


def test_what_is_skipped_is_zero_whatever_the_inputs(operation: MaskedLinear) -> None:
    """NaNs and infinities reach their own token's wanted neurons and nothing else."""
    case = Case((200, 96), 3)
    expected = case.check(operation, None, case.skips)
    case.x[1, 3] = np.nan
    for skips in (case.skips, np.array([True, True, False])):
        found = operation(case.x, case.scores, case.matrix, None, skips)
        assert np.isnan(found[1][case.scores[1] > 0]).all()
        assert_same_bits(found[1][case.scores[1] <= 0], np.zeros((case.scores[1] <= 0).sum(), np.float32))
        assert_same_bits(found[0], expected[0])


def test_a_tokens_bits_do_not_depend_on_batch_or_threads(operations: list[MaskedLinear]) -> None:
    """Sizes on both sides of a pass, work shared and not, tokens that may skip beside others."""
    random = np.random.default_rng(1)
    for shape in ((300, 96), (2500, 320)):
        case = Case(shape, 24, 1)
        case.skips[::5] = False
        alone = case.check(operations[0], case.bias, case.skips)
        for _ in range(60):
            chosen = random.permutation(24)[: random.integers(1, 25)]
            inputs = case.x[chosen], case.scores[chosen], case.matrix, case.bias, case.skips[chosen]
            assert_same_bits(operations[random.integers(3)](*inputs), alone[chosen])


def test_nothing_is_written_beside_the_output(operation: MaskedLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array the operation allocates lies between guard bytes that must survive."""
    allocated = GuardedAllocations()
    for shape in SHAPES:
        case = Case(shape, 11)
        with monkeypatch.context() as patch:
            patch.setattr("hetero_ee_cpu_ops.neurons.masked_linear.np.empty", allocated.empty)
            found = [operation(case.x, case.scores, case.matrix, None, skips) for skips in (None, case.skips)]
        for skips, each in zip((None, case.skips), found, strict=True):
            assert_same_bits(each, masked_reference(case.x, case.scores, case.rows, None, skips))
    assert len(allocated.arrays) == 4 * len(SHAPES)
    allocated.check()


def test_no_tokens_give_no_rows(operation: MaskedLinear) -> None:
    case = Case((200, 96), 0)
    assert operation(case.x, case.scores, case.matrix, None, case.skips).shape == (0, 200)


def test_scores_may_be_left_out_where_no_token_may_skip(operation: MaskedLinear) -> None:
    case = Case((65, 32), 2)
    assert_same_bits(operation(case.x, None, case.matrix), case.check(operation))


def test_wrong_operands_are_refused(operation: MaskedLinear) -> None:
    case = Case((200, 96), 2)
    x, scores, bias, skips = case.x, case.scores, case.bias, case.skips
    for wrong in (x.astype(np.float64), x[:, :64], np.zeros((2, 192), np.float32)[:, ::2], x[0], x[:1]):
        with pytest.raises(ValueError, match=r"Activations are|do not match|\(2, 200\)"):
            operation(wrong, scores, case.matrix, bias, skips)
    for wrong in (scores.astype(np.float64), scores[:, :64], np.asfortranarray(scores), scores[0], scores[:1], None):
        with pytest.raises(ValueError, match=r"do not fit|do not match"):
            operation(x, wrong, case.matrix, bias, skips)
    for wrong in (bias.astype(np.float64), bias[:64], bias[None], np.zeros(400, np.float32)[::2]):
        with pytest.raises(ValueError, match=r"do not fit|do not match"):
            operation(x, scores, case.matrix, wrong, skips)
    for wrong in (skips.astype(np.int32), skips[:1], skips[None]):
        with pytest.raises(ValueError, match=r"do not fit|do not match"):
            operation(x, scores, case.matrix, bias, wrong)
    with pytest.raises(ValueError, match="do not fit"):
        operation(x, scores[:1], case.matrix)
