"""The reference's own promise: a row's bits do not depend on its batch, on memory alignment or on torch's threads."""

from collections.abc import Iterator

import pytest
import torch

from hetero_ee.layers.ops import Activation
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.weights.weight import DenseWeight


@pytest.fixture(params=[1, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "fatrelu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("ffn_size", [76, 11008, 14336, 40000])
def test_activations_of_a_row_do_not_depend_on_its_batch(
    threads: int, activation: str, gated: bool, ffn_size: int
) -> None:
    kind = Activation(activation, 0.1, gated)
    x = torch.randn(5, ffn_size * (1 + gated), generator=torch.Generator().manual_seed(threads))
    together = TorchOps().activate(x, kind)
    for row in range(5):
        assert torch.equal(together[row], TorchOps().activate(x[row : row + 1], kind)[0])


@pytest.mark.parametrize("n_columns", [48, 54, 57, 4096])
def test_products_of_a_row_do_not_depend_on_where_it_lies(threads: int, n_columns: int) -> None:
    weight, x = DenseWeight(torch.randn(131, n_columns)), torch.randn(17, n_columns)
    together = TorchOps().product(x, weight)
    for row in range(17):
        assert torch.equal(together[row], TorchOps().product(x[row : row + 1], weight)[0])
