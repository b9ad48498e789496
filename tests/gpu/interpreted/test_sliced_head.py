"""Logits of candidates: the bits of the whole product at those columns."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.matmul import matmul
from hetero_ee_kernels.sliced_head import sliced_head
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, random
from tests.gpu_tiles import VOCABULARY_KINDS, activations, nmse, random_matrix

N_ROWS = 20


def ids(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.few(5)
@pytest.mark.parametrize("n_columns", [64, 1088])
@pytest.mark.parametrize("kind", VOCABULARY_KINDS)
@pytest.mark.sample(1)
def test_bits_of_the_whole_product(kind: str, n_columns: int) -> None:
    weight, x = random_matrix(kind, (N_ROWS, n_columns)), activations(1, 3, n_columns)
    expected = matmul(x, weight)
    shared = ids(19, 0, 7, 7, 16)
    out = Guarded((3, 5))
    assert sliced_head(x, weight, shared, out.tensor) is out.tensor
    assert_same_bits(out.check(), expected[:, shared])
    own = ids([1, 15], [18, 1], [19, 19])
    assert_same_bits(sliced_head(x, weight, own), expected.gather(1, own))


def test_an_id_without_a_row_gives_nan() -> None:
    weight, x = random_matrix("codebook", (N_ROWS, 64)), random(2, 2, 64)
    wrong = ids(3, -1, N_ROWS, 2**40, 5)
    found = sliced_head(x, weight, wrong)
    assert found.isnan().tolist() == [[False, True, True, True, False]] * 2
    assert_same_bits(found[:, [0, 4]], matmul(x, weight)[:, [3, 5]])


def test_the_reference_agrees() -> None:
    weight, x, own = random_matrix("int8", (N_ROWS, 96)), random(3, 2, 96), ids([19, 4, 99], [0, 1, 2])
    found, expected = sliced_head(x, weight, own), reference.sliced_head(x, weight, own)
    assert torch.equal(found.isnan(), expected.isnan()) and nmse(found.nan_to_num(), expected.nan_to_num()) <= 1e-9


def test_wrong_ids_are_refused() -> None:
    weight, x = random_matrix("linear", (N_ROWS, 64)), random(4, 2, 64)
    for wrong in (ids(1, 2).int(), ids([1], [2], [3]), ids([[1]]), ids(1, 2, 3, 4)[::2]):
        with pytest.raises(ValueError, match="Ids are"):
            sliced_head(x, weight, wrong)
    with pytest.raises(ValueError, match="Activations are"):
        sliced_head(x.double(), weight, ids(1))
    assert sliced_head(x, weight, ids()).shape == (2, 0)
