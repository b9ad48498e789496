"""The sparse FFN against its definition in plain numpy, bit for bit, and against float64 on dequantized weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero_ee.weights.sections import section_neurons
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.neurons.rows import RowMatrix
from hetero_ee_cpu_ops.neurons.sparse_ffn import SparseFfn, n_blocks_per_section
from tests.cpu_support import GuardedAllocations, assert_same_bits, teams
from tests.sparse_ffn_reference import FITTED, LINEAR, SETS, Rows, reference

SHAPES = ((64, 64), (65, 32), (200, 96), (1, 32), (300, 1056), (4200, 128))  # the last: two blocks a section


class Case:
    """An FFN's matrices and the inputs of m tokens."""

    def __init__(self, shape: tuple[int, int], m: int, seed: int = 0, is_gated: bool = True) -> None:
        random, (n, k) = np.random.default_rng(seed), shape
        self.up = Rows.random(shape, FITTED, -12, seed) if is_gated else None
        self.down = Rows.random(shape, LINEAR if seed % 2 else FITTED, -11, seed + 1)
        self.x = random.standard_normal((m, k), np.float32)
        self.active = random.standard_normal((m, n), np.float32)
        self.up_matrix = self.up.matrix() if self.up else None
        self.down_matrix = self.down.matrix()

    def random_share(self, share: float, seed: int = 0) -> Any:
        kept = np.random.default_rng(seed).random(self.active.shape) < share
        return np.where(kept, self.active, np.float32(0))

    def run(self, operation: SparseFfn, active: Any, tokens: Any = slice(None)) -> Any:
        x, active = np.ascontiguousarray(self.x[tokens]), np.ascontiguousarray(active[tokens], np.float32)
        return operation(x if self.up else None, active, self.up_matrix, self.down_matrix)

    def expected(self, active: Any) -> Any:
        return reference(self.x, np.ascontiguousarray(active, np.float32), self.up, self.down)


@pytest.fixture(scope="module")
def operation() -> SparseFfn:
    return SparseFfn(ThreadPool(1))


@pytest.fixture(scope="module")
def operations() -> Iterator[list[SparseFfn]]:
    with teams() as pools:
        yield [SparseFfn(pool) for pool in pools]


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_definition(operation: SparseFfn, shape: tuple[int, int], is_gated: bool) -> None:
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 19):
        case = Case(shape, m, m, is_gated)
        active = case.random_share((1, 0.5, 0.1)[m % 3], m)
        assert_same_bits(case.run(operation, active), case.expected(active))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("m", [1, 5])
def test_bits_are_the_same_for_awkward_active_sets(operation: SparseFfn, name: str, m: int) -> None:
    for shape in SHAPES[1:3]:
        case = Case(shape, m)
        active = SETS[name](case.active).astype(np.float32)
        assert_same_bits(case.run(operation, active), case.expected(active))


def test_random_active_sets_of_every_density(operation: SparseFfn) -> None:
    case = Case((300, 96), 3)
    for percent in (1, 2, 5, 10, 20, 30, 50, 70, 80, 90, 99):
        active = case.random_share(percent / 100, percent)
        assert_same_bits(case.run(operation, active), case.expected(active))


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_tokens_bits_do_not_depend_on_batch_or_threads(operations: list[SparseFfn], is_gated: bool) -> None:
    """The union of the others' neurons adds nothing; sizes on both sides of a pass, work shared and not."""
    random = np.random.default_rng(1)
    for shape in ((300, 96), (2500, 320)):
        case = Case(shape, 24, 1, is_gated)
        active = np.concatenate([case.random_share(share)[:4] for share in (0.02, 0.1, 0.3, 0.6, 0.9, 1)])
        alone = np.concatenate([case.run(operations[0], active, [token]) for token in range(24)])
        for _ in range(60):
            chosen = random.permutation(24)[: random.integers(1, 25)]
            assert_same_bits(case.run(operations[random.integers(3)], active, chosen), alone[chosen])


def test_neurons_that_are_read_for_nothing_change_no_bit(operation: SparseFfn) -> None:
    """Values far below a weight's step, and below what has any step, count as zeros do."""
    case = Case((200, 96), 2, is_gated=False)
    for share in (0, 0.02, 0.3):
        sparse = case.random_share(share, 1)
        dense = np.where(sparse == 0, np.float32(1e-37), sparse)
        assert_same_bits(case.run(operation, dense), case.run(operation, sparse))
    negative_zeros = np.where(sparse == 0, np.float32(-0.0), sparse)
    assert_same_bits(case.run(operation, negative_zeros), case.run(operation, sparse))


@pytest.mark.parametrize("is_gated", [True, False])
def test_outputs_are_near_those_of_the_dequantized_weights(operation: SparseFfn, is_gated: bool) -> None:
    case = Case((2500, 320), 4, 1, is_gated)
    active = case.random_share(0.4)
    h = active.astype(np.float64)
    if case.up:
        h *= case.x.astype(np.float64) @ case.up.dequantized().T
    expected = h @ case.down.dequantized()
    error = ((case.run(operation, active) - expected) ** 2).sum() / (expected**2).sum()
    assert error < 3e-4  # x and h in int8, as a tile matmul's inputs are


def test_the_sections_from_one_on_are_a_prefix_of_the_sum(operations: list[SparseFfn]) -> None:
    case = Case((4200, 96), 3)
    active = case.random_share(0.3)
    n_sections = -(-33 // n_blocks_per_section(4200))
    assert n_blocks_per_section(4200) == 2 == section_neurons(4200) // 128 and n_sections == 17
    whole = case.run(operations[0], active)
    for section in (0, 1, 7, 16):
        only = active.copy()
        only[:, : section * 2 * 128] = 0
        part = operations[section % 3].from_section(case.x, active, case.up_matrix, case.down_matrix, section)
        assert_same_bits(part, reference(case.x, active, case.up, case.down, section))
        assert_same_bits(part * np.float32(2.0**-11), case.run(operations[0], only))
    assert_same_bits(operations[0].from_section(case.x, active, case.up_matrix, case.down_matrix, 0), whole * 2**11)
    for section in (-1, 17):
        with pytest.raises(ValueError, match=f"Section {section} does not exist"):
            operations[0].from_section(case.x, active, case.up_matrix, case.down_matrix, section)


@pytest.mark.parametrize("is_gated", [True, False])
def test_the_first_sections_can_be_added_elsewhere(operation: SparseFfn, is_gated: bool) -> None:
    """Wherever the sum is cut, its bits are the same."""
    case = Case((2500, 96), 2, is_gated=is_gated)
    active, matrices = case.random_share(0.3), (case.up_matrix, case.down_matrix)
    for section in range(1, 20):
        rest = operation.from_section(case.x, active, *matrices, section)
        assert_same_bits(operation.onto(rest, case.x, active, *matrices, section), case.run(operation, active))


def test_nans_infinities_and_very_small_values(operation: SparseFfn) -> None:
    case = Case((200, 96), 6)
    active = case.random_share(0.5)
    case.x[0, 3] = np.nan
    case.x[1, 40] = np.inf
    active[2, 77] = np.nan
    active[3, 77] = np.inf
    active[4] *= np.float32(1e-20)
    active[5] *= np.float32(1e-38)
    found, expected = case.run(operation, active), case.expected(active)
    assert np.isnan(found[:4]).all() and np.isnan(expected[:4]).all()
    assert_same_bits(found[4:], expected[4:])
    assert found[4].any() and not found[5].any()


def test_a_token_with_nans_leaves_the_others_alone(operation: SparseFfn) -> None:
    case = Case((200, 96), 3)
    active = case.random_share(0.3)
    expected = case.run(operation, active)
    case.x[1] = np.nan
    active[1] = np.inf
    assert_same_bits(case.run(operation, active)[[0, 2]], expected[[0, 2]])


def test_the_largest_sums_stay_exact(operation: SparseFfn) -> None:
    """Entries of one sign at the codebook's ends, all weights and activations at their limit."""
    for code in (0, 15):
        case = Case((128, 64), 2)
        assert case.up is not None
        for rows in (case.up, case.down):
            rows.codes[:] = code
            rows.scales[:] = 1
        case.up_matrix, case.down_matrix = case.up.matrix(), case.down.matrix()
        for value in (1, -1):
            case.x[:], case.active[:] = value, 1
            assert_same_bits(case.run(operation, case.active), case.expected(case.active))


def test_nothing_is_written_beside_the_output(operation: SparseFfn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array the operation allocates lies between guard bytes that must survive."""
    allocated = GuardedAllocations()
    for shape in SHAPES:
        case = Case(shape, 11)
        expected = case.run(operation, case.active)
        with monkeypatch.context() as patch:
            patch.setattr("hetero_ee_cpu_ops.neurons.sparse_ffn.np.empty", allocated.empty)
            assert_same_bits(case.run(operation, case.active), expected)
    assert len(allocated.arrays) == 3 * len(SHAPES)
    allocated.check()


def test_no_tokens_give_no_rows(operation: SparseFfn) -> None:
    case = Case((200, 96), 0)
    assert case.run(operation, case.active).shape == (0, 96)


def test_wrong_operands_are_refused(operation: SparseFfn) -> None:
    case, other = Case((200, 96), 2), Case((200, 128), 2)
    for x in (case.x.astype(np.float64), case.x[:, :64], np.zeros((2, 192), np.float32)[:, ::2], case.x[:1], case.x[0]):
        with pytest.raises(ValueError, match="Activations are"):
            operation(x, case.active, case.up_matrix, case.down_matrix)
    for active in (case.active.astype(np.float64), case.active[:, :64], np.asfortranarray(case.active), case.active[0]):
        with pytest.raises(ValueError, match="active is"):
            operation(case.x, active, case.up_matrix, case.down_matrix)
    with pytest.raises(ValueError, match="up has 200 rows of 128 columns, down 200 of 96"):
        operation(case.x, case.active, other.up_matrix, case.down_matrix)


def test_wrong_matrices_are_refused() -> None:
    codes, scales = np.zeros((20, 64), np.uint8), np.ones((20, 4), np.float16)
    assert RowMatrix(codes, scales, 0, LINEAR, 100).n_units == 2
    for arguments in (
        (codes[:, :32], scales, 0, LINEAR, 100),
        (codes, scales, 0, LINEAR, 129),
        (codes, scales, 0, LINEAR, 64),
        (codes, scales, 0, LINEAR, 0),
        (codes.astype(np.int8), scales, 0, LINEAR, 100),
        (codes, scales.astype(np.float32), 0, LINEAR, 100),
        (codes, scales[:10], 0, LINEAR, 100),
        (codes, scales[:, :3], 0, LINEAR, 100),
        (np.asfortranarray(codes), scales, 0, LINEAR, 100),
        (codes, np.asfortranarray(scales), 0, LINEAR, 100),
        (codes, scales, 0, (*LINEAR[:15], 33), 100),
        (codes, scales, 0, (-33, *LINEAR[1:]), 100),
        (codes, scales, 0, LINEAR[:15], 100),
    ):
        with pytest.raises(ValueError, match=r"[Cc]odes|[Ss]cales|codebook"):
            RowMatrix(*arguments)
