"""The sparse FFN: bit for bit its definition, as the CPU's kernel is; and near the plain torch reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.ops.arena import Arena
from hetero_ee.ops.gpu_operations import gpu_operations
from hetero_ee.ops.registry import Registry
from hetero_ee.runtime.gpu.segment import GpuResources, GpuSegment
from hetero_ee.weights.sections import section_neurons
from hetero_ee_kernels import rows_reference
from hetero_ee_kernels.row_matrix import RowMatrix, Skips
from hetero_ee_kernels.sparse_ffn import first_sections, fold_sections, n_blocks_per_section, sparse_ffn
from tests import sparse_ffn_reference as definition
from tests.families import random_model, save_checkpoint
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, random
from tests.gpu_tiles import nmse
from tests.sparse_ffn_reference import FITTED, LINEAR, SETS, Rows
from tests.sparse_models import stored_by_neurons, with_least

BOUND = 1e-9


def matrix(rows: Rows) -> RowMatrix:
    codes, scales = rows.packed()
    here = (torch.from_numpy(part).to(DEVICE) for part in (codes, scales))
    return RowMatrix(*here, rows.exponent, rows.codebook, rows.n_columns)


class Case:
    """An FFN's matrices and the inputs of m tokens."""

    def __init__(self, shape: tuple[int, int], m: int, *, is_gated: bool = True) -> None:
        random, (n, k) = np.random.default_rng(m), shape
        self.up = Rows.random(shape, FITTED, -12, m) if is_gated else None
        self.down = Rows.random(shape, LINEAR if m % 2 else FITTED, -11, m + 1)
        self.x = random.standard_normal((m, k), np.float32)
        self.active = random.standard_normal((m, n), np.float32)
        self.up_matrix, self.down_matrix = matrix(self.up) if self.up else None, matrix(self.down)

    def run(
        self, active: Any, operation: Any = sparse_ffn, tokens: Any = slice(None), out: Any = None, **skips: Any
    ) -> torch.Tensor:
        x, active = (torch.tensor(each[tokens], device=DEVICE) for each in (self.x, active))
        operands = x if self.up else None, active, self.up_matrix, self.down_matrix
        found: torch.Tensor = operation(*operands, out, Skips(**skips))
        return found

    def expected(self, active: Any) -> torch.Tensor:
        return torch.from_numpy(definition.reference(self.x, active, self.up, self.down)).to(DEVICE)


@pytest.mark.parametrize("name", SETS)
def test_awkward_active_sets_have_the_definitions_bits(name: str) -> None:
    """The CPU's kernel has the same, see tests/cpu/test_sparse_ffn.py."""
    case = Case((100, 64), 2)
    active = SETS[name](case.active).astype(np.float32)
    out = Guarded((2, 64))
    assert case.run(active, out=out.tensor) is out.tensor
    assert_same_bits(out.check(), case.expected(active))


@pytest.mark.parametrize(("shape", "m", "is_gated"), [((1, 32), 1, True), ((70, 200), 2, True), ((64, 64), 17, False)])
def test_bits_of_any_shape_are_the_definitions(shape: tuple[int, int], m: int, is_gated: bool) -> None:
    case = Case(shape, m, is_gated=is_gated)
    assert_same_bits(case.run(case.active), case.expected(case.active))


@pytest.mark.parametrize("name", ["even blocks", "alternating"])
@pytest.mark.sample(1)
def test_sections_of_two_blocks(name: str) -> None:
    """Sections with neurons in one block, and in both."""
    case = Case((4200, 32), 1, is_gated=False)
    active = SETS[name](case.active).astype(np.float32)
    active[:, :2048] *= np.arange(2048) % 50 == 0
    assert_same_bits(case.run(active), case.expected(active))


@pytest.mark.parametrize(("n_neurons", "is_gated"), [(700, True), (4200, False)])
@pytest.mark.sample(1)
def test_the_first_sections_are_added_to_the_rest(n_neurons: int, is_gated: bool) -> None:
    """Wherever the sum is cut, its bits are the same; only the first rows need to be there."""
    case = Case((n_neurons, 32), 2, is_gated=is_gated)
    active = SETS["another for each token"](case.active).astype(np.float32)
    whole, size = case.run(active), n_blocks_per_section(n_neurons)
    assert section_neurons(n_neurons) == size * 128, "plans divide FFNs where the kernels do"
    x, down = torch.tensor(case.x, device=DEVICE) if case.up else None, case.down_matrix
    for section in (1, 2, 5):
        rest = definition.reference(case.x, active, case.up, case.down, section)
        here, n = torch.tensor(rest, device=DEVICE), section * size * 128
        up, some = None if case.up is None else matrix(case.up.first(n)), matrix(case.down.first(n))
        sums = first_sections(x, torch.tensor(active[:, :n], device=DEVICE), up, some, size)
        assert len(sums) == section
        assert_same_bits(fold_sections(sums, down, torch.empty_like(whole), here), whole)
    with pytest.raises(ValueError, match="17 tokens"):
        first_sections(None, torch.zeros(17, n, device=DEVICE), None, some, size)


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    case = Case((33, 32), 8)
    active = SETS["another for each token"](case.active).astype(np.float32)
    together = case.run(active)
    for m in range(1, 8):
        assert_same_bits(case.run(active, tokens=slice(8 - m, 8)), together[8 - m :])


def test_rows_of_inactive_neurons_are_not_read() -> None:
    """Whatever lies there."""
    case = Case((100, 64), 2)
    active = SETS["alternating"](case.active).astype(np.float32)
    expected = case.run(active)
    assert case.up_matrix is not None
    for weight in (case.up_matrix, case.down_matrix):
        weight.scales[::2] = float("nan")
    assert_same_bits(case.run(active), expected)


@pytest.mark.parametrize("operation", [sparse_ffn, rows_reference.sparse_ffn], ids=["kernel", "reference"])
def test_thresholds_skip_neurons_of_rows_that_may(operation: Any) -> None:
    case = Case((100, 64), 3, is_gated=False)
    least = np.abs(case.active).mean(0)
    may_skip, n_used = np.array([1, 0, 1], np.int32), torch.tensor([5], device=DEVICE)
    more = {name: torch.from_numpy(part).to(DEVICE) for name, part in (("least", least), ("may_skip", may_skip))}
    found = case.run(case.active, operation, n_used=n_used, **more)
    active = np.where((may_skip[:, None] == 1) & (np.abs(case.active) < least), np.float32(0), case.active)
    assert_same_bits(found, case.run(active, operation))
    assert n_used.item() == 5 + np.count_nonzero(active[[0, 2]])


@pytest.mark.parametrize("is_gated", [True, False])
def test_the_plain_reference_is_near(is_gated: bool) -> None:
    case = Case((100, 60), 2, is_gated=is_gated)
    active = SETS["another for each token"](case.active).astype(np.float32)
    expected = case.run(active, rows_reference.sparse_ffn)
    assert nmse(case.run(active), expected) <= BOUND
    assert_same_bits(case.run(active, rows_reference.sparse_ffn, slice(1, 2)), expected[1:2])


def test_zeros_and_what_is_not_finite() -> None:
    case = Case((70, 64), 5)
    active = np.maximum(case.active, 0)
    case.x[0] = 0
    case.x[1, 40], case.x[2, 3] = np.nan, np.inf
    active[3, 7], active[4] = np.nan, active[4] * 1e-32
    found, expected = case.run(active), case.expected(active)
    assert torch.equal(found.isnan(), expected.isnan()) and found[3].isnan().all()
    assert_same_bits(found.nan_to_num(), expected.nan_to_num())
    nearly = case.run(active, rows_reference.sparse_ffn)
    assert torch.equal(nearly.isnan(), expected.isnan())


def test_the_largest_sums_stay_exact() -> None:
    case = Case((64, 64), 2)
    case.down.codes[:], case.down.scales[:], case.down.codebook = 15, 1, FITTED
    case.down_matrix, case.up, case.up_matrix = matrix(case.down), None, None
    active = np.full_like(case.active, 127)
    assert_same_bits(case.run(active), case.expected(active))
    assert case.run(active)[0, 0] == 64 * 127 * 32 * 2.0**case.down.exponent


def test_wrong_operands_are_refused() -> None:
    case = Case((64, 64), 2)
    with pytest.raises(ValueError, match="active is"):
        case.run(case.active[:, :32])
    case.x = case.x[:, :32]
    with pytest.raises(ValueError, match="x is"):
        case.run(case.active)
    with pytest.raises(ValueError, match="may_skip is needed"):
        Case((64, 64), 1).run(case.active[:1], n_used=torch.zeros(1, dtype=torch.int64, device=DEVICE))
    case.up_matrix = matrix(Rows.random((32, 64), FITTED, 0, 0))
    with pytest.raises(ValueError, match="up has 32 rows"):
        case.run(case.active)


def test_wrong_matrices_are_refused() -> None:
    codes, scales = Rows.random((8, 64), FITTED, 0, 0).packed()
    good = torch.from_numpy(codes), torch.from_numpy(scales), 0, FITTED, 64
    for wrong, message in (
        ((good[0][:, :16], *good[1:]), "codes is"),
        ((good[0], good[1].float(), *good[2:]), "scales is"),
        ((*good[:3], (-64, *FITTED[1:]), 64), "codebook"),
        ((*good[:4], 100), "codes is"),
        ((good[0].T.contiguous().T, *good[1:]), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            RowMatrix(*wrong)


def test_a_segment_of_sparse_ffns(tmp_path: Path) -> None:
    """The kernel in its place, launched and replayed, against the plain reference there."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    folder = save_checkpoint(random_model("llama-relu", **sizes), tmp_path)
    spec, weights = with_least(stored_by_neurons(folder), 0.5)
    plain, found = gpu_operations(Registry(lambda package: package == "torch"), "cuda"), []
    for operations in (plain, replace(plain, sparse_ffn=sparse_ffn)):
        cache = GpuKvCache((spec.n_layers, spec.n_kv_heads, spec.head_dim), 64, torch.device(DEVICE), kind="fp16")
        arena, sequence = Arena(spec, cache), cache.open_new()
        resources = GpuResources(cache, operations, lambda work: work, arena)
        segment = GpuSegment(spec, weights, decoder_blocks(spec)[1:3], resources)
        rows = []
        for first in range(3):
            batch = Batch.of_sequence(sequence, 2 * first + 4 * (first > 0), [1, 2] if first else [1, 2, 3, 4, 5, 6])
            cache.admit(batch)
            rows.append(segment.run(random(first, len(batch), 32), batch))
        found.append((torch.cat(rows), arena))
    (expected, counted), (bits, arena) = found
    assert nmse(bits, expected) <= BOUND
    assert arena.n_used.item() == counted.n_used.item() > 0 and arena.n_neurons == counted.n_neurons == 6 * 96
