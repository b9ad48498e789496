"""Our int4 tiles in bitsandbytes' layout, by bitsandbytes' own dequantization.

Its matrix-vector product with a table of ours runs on NVIDIA GPUs alone; elsewhere it has only its own tables. So its
factors and the places of codes are checked with its table, and the table by itself.
"""

import logging
from typing import Any

import pytest
import torch

from hetero_ee.errors import UsageError
from hetero_ee.ops.bitsandbytes_matmul import BLOCK, bitsandbytes_matrix, matmul
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.weight import TileWeight


@pytest.fixture(scope="module")
def functional() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it would like a package that downloads code
    return pytest.importorskip("bitsandbytes.functional")


def weight_of(shape: tuple[int, int], quantizer: str = "codebook") -> TileWeight:
    weight = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])), quantizer)
    assert isinstance(weight, TileWeight)
    return weight


@pytest.mark.parametrize("quantizer", ["rtn", "codebook"])
@pytest.mark.parametrize("shape", [(16, 32), (40, 70), (17, 96), (3, 160)])  # K an odd number of groups, too
@pytest.mark.sample(0)
def test_bitsandbytes_reads_our_weights(functional: Any, shape: tuple[int, int], quantizer: str) -> None:
    weight = weight_of(shape, quantizer)
    matrix = bitsandbytes_matrix(weight, torch.device("cpu"))
    size = torch.Size((matrix.n_rows, matrix.n_columns))
    state = functional.QuantState(matrix.factors, size, matrix.table, BLOCK, "nf4", torch.float32)
    theirs = functional.dequantize_4bit(matrix.packed, state)
    nf4 = functional.get_4bit_type("nf4", device="cpu")
    codes = layout.unpack(weight.tiles)[: shape[0]].int()
    factors = matrix.factors.view(shape[0], -1).repeat_interleave(BLOCK, 1)
    assert torch.equal(theirs, nf4[codes] * factors)
    ours = (matrix.table[codes] * factors)[:, : shape[1]]
    assert torch.equal(ours, weight.dequantize())


def test_a_byte_the_wrong_way_round_is_seen(functional: Any) -> None:
    weight = weight_of((16, 64))
    matrix = bitsandbytes_matrix(weight, torch.device("cpu"))
    state = functional.QuantState(matrix.factors, torch.Size((16, 64)), matrix.table, BLOCK, "nf4", torch.float32)
    right = functional.dequantize_4bit(matrix.packed, state)
    assert not torch.equal(functional.dequantize_4bit(matrix.packed << 4 | matrix.packed >> 4, state), right)


def test_eight_bits_and_other_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="4-bit weights only"):
        bitsandbytes_matrix(weight_of((16, 32), "int8"), torch.device("cpu"))
    with pytest.raises(UsageError, match="on NVIDIA GPUs only, not on cpu"):
        matmul(torch.zeros(1, 32), bitsandbytes_matrix(weight_of((16, 32)), torch.device("cpu")))


@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shape", [(40, 70), (128, 160), (4096, 4096)])
def test_products_on_a_gpu(functional: Any, shape: tuple[int, int]) -> None:
    weight, x = weight_of(shape), torch.randn(3, shape[1])
    matrix = bitsandbytes_matrix(weight, torch.device("cuda"))
    found = matmul(x.cuda(), matrix)
    expected = x.double() @ weight.dequantize().double().T
    assert (found.cpu() - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(matmul(x[1:2].cuda(), matrix)[0], found[1])
