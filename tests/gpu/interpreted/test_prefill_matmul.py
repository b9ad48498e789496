"""The product for many rows: within fp16's rounding of the weights, whatever the sizes."""

import pytest
import torch

from hetero_ee_kernels import prefill_matmul as module
from hetero_ee_kernels.prefill_matmul import BLOCKS, BLOCKS_TURING, block_for, prefill_matmul
from hetero_ee_kernels.reference import matmul as reference
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, random
from tests.gpu_tiles import KINDS, activations, nmse, random_matrix

BOUND = 5e-7  # a rounding to 11 bits is 3e-8 to 6e-8
SHAPES = [(16, 32, 1), (70, 1054, 17), (128, 96, 33), (1, 64, 65), (131, 250, 130)]


@pytest.mark.few(7)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_float64(kind: str, shape: tuple[int, int, int]) -> None:
    n_rows, n_columns, m = shape
    weight, x = random_matrix(kind, (n_rows, n_columns)), activations(1, m, n_columns).half()
    out = Guarded((m, n_rows))
    assert prefill_matmul(x, weight, out.tensor) is out.tensor
    assert nmse(out.check(), reference.prefill_matmul(x, weight)) <= BOUND


def test_the_block_for_cards_whose_tensor_cores_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_matrix("codebook", (40, 96)), random(2, 20, 96).half()
    monkeypatch.setattr(module, "_blocks", lambda x: BLOCKS_TURING)
    assert nmse(prefill_matmul(x, weight), reference.prefill_matmul(x, weight)) <= BOUND


def test_the_smallest_block_that_holds_the_rows() -> None:
    assert [block_for(m, BLOCKS) for m in (16, 17, 64, 65, 5000)] == [BLOCKS[i] for i in (0, 1, 2, 3, 3)]
    assert block_for(5000, BLOCKS_TURING) is BLOCKS_TURING[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_scales_overflow_nothing(kind: str) -> None:
    weight, x = random_matrix(kind, (16, 64)), random(3, 3, 64).half()
    weight.scales.fill_(65504.0)
    assert nmse(prefill_matmul(x, weight), reference.prefill_matmul(x, weight)) <= BOUND


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight, x = random_matrix("linear", (32, 64)), random(4, 20, 64).half()
    expected = prefill_matmul(x, weight)
    x[3, 5], x[18, 40] = float("nan"), float("inf")
    found = prefill_matmul(x, weight)
    assert found[3].isnan().all() and not found[18].isfinite().all()
    others = [row for row in range(20) if row not in (3, 18)]
    assert_same_bits(found[others], expected[others])


def test_wrong_operands_are_refused() -> None:
    weight = random_matrix("linear", (16, 64))
    for wrong in (random(5, 2, 64), random(5, 2, 32).half(), random(5, 64).half()):
        with pytest.raises(ValueError, match="activations are"):
            prefill_matmul(wrong, weight)
    assert prefill_matmul(torch.empty((0, 64), dtype=torch.float16, device=DEVICE), weight).shape == (0, 16)
