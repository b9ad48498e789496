"""Embedding rows, bit for bit those of the dequantized matrix."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.embed import embed
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, int32, random
from tests.gpu_tiles import VOCABULARY_KINDS, random_matrix

OFFSET = 2


@pytest.mark.parametrize("n_columns", [64, 40, 1056])
@pytest.mark.parametrize("kind", VOCABULARY_KINDS)
def test_rows_are_the_matrix_s(kind: str, n_columns: int) -> None:
    weight = random_matrix(kind, (37, n_columns))
    ids, positions = int32(36, 0, 17, 17, 5), int32(0, 1, 2, 9, 4)
    expected = reference.dequantize(weight)[ids.long(), :n_columns]
    for operation in (embed, reference.embed):
        out = Guarded((5, n_columns))
        assert operation(ids, weight, n_columns, out.tensor, positions=positions) is out.tensor
        assert_same_bits(out.check(), expected)


@pytest.mark.parametrize("kind", VOCABULARY_KINDS)
def test_learned_positions_are_added(kind: str) -> None:
    weight, learned = random_matrix(kind, (20, 96)), random(1, 12, 96)
    ids, positions = int32(3, 19, 3), int32(9, 0, 4)
    expected = reference.dequantize(weight)[ids.long()] + learned[positions.long() + OFFSET]
    for operation in (embed, reference.embed):
        found = operation(ids, weight, 96, learned=learned, positions=positions, offset=OFFSET)
        assert_same_bits(found, expected)


def test_wrong_arguments_are_refused() -> None:
    weight, ids = random_matrix("int8", (20, 64)), int32(1, 2)
    bad: list[dict[str, Any]] = [
        {"ids": ids.long()},
        {"positions": int32(1)},
        {"n_columns": 128},
        {"out": torch.empty(2, 60, device=DEVICE)},
        {"learned": torch.empty(9, 60, device=DEVICE)},
    ]
    for changed in bad:
        with pytest.raises(ValueError):
            embed(**({"ids": ids, "weight": weight, "n_columns": 64, "positions": ids} | changed))
    assert embed(int32(), weight, 64, positions=int32()).shape == (0, 64)
