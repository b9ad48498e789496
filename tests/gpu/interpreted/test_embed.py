"""Rows of a matrix in tiles: the bits of plain torch."""

import pytest
import torch

from hetero_ee.weights.weight import TileWeight
from hetero_ee_kernels.embed import COLUMNS, embed
from hetero_ee_kernels.reference import embed as reference
from tests.gpu_support import DEVICE, Guarded, assert_same_bits
from tests.gpu_tiles import CODEBOOKS, EXPONENT, KINDS, random_matrix

IDS = (0, 17, 36, 17, 15)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("n_columns", [1, 32, 75, COLUMNS + 40])
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str, n_columns: int) -> None:
    matrix = random_matrix(kind, (37, n_columns))
    out = Guarded((len(IDS), n_columns))
    assert embed(matrix, n_columns, ids(*IDS), out.tensor) is out.tensor
    parts = (matrix.tiles.cpu(), matrix.scales.cpu(), EXPONENT, CODEBOOKS[kind], 37, n_columns)
    assert_same_bits(out.check().cpu(), TileWeight(*parts).rows(torch.tensor(IDS)))
    assert_same_bits(out.tensor, reference.embed(matrix, n_columns, ids(*IDS)))


@pytest.mark.parametrize("kind", KINDS)
def test_fp16_output_is_the_same_rounded(kind: str) -> None:
    matrix = random_matrix(kind, (37, 64))
    out = Guarded((len(IDS), 64), torch.float16)
    embed(matrix, 64, ids(*IDS), out.tensor)
    assert_same_bits(out.check(), embed(matrix, 64, ids(*IDS)).half())


def test_an_id_without_a_row_gives_nan() -> None:
    matrix = random_matrix("linear", (37, 40))
    wrong = ids(3, -1, 37, 2**40, 36)
    found = embed(matrix, 40, wrong)
    assert found.isnan().all(1).tolist() == [False, True, True, True, False]
    assert torch.equal(found.isnan(), reference.embed(matrix, 40, wrong).isnan())


def test_wrong_operands_are_refused() -> None:
    matrix = random_matrix("linear", (37, 64))
    with pytest.raises(ValueError, match="ids are"):
        embed(matrix, 64, ids(1).int())
    for n_columns, out in ((96, None), (64, torch.empty(2, 64)), (64, torch.empty(1, 64, dtype=torch.float64))):
        with pytest.raises(ValueError, match="don't give"):
            embed(matrix, n_columns, ids(1), out if out is None else out.to(DEVICE))
    assert embed(matrix, 64, ids()).shape == (0, 64)
