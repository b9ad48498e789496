"""Products of pairs of tokens and experts: the bits of each expert's own product, for decode passes and prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee_kernels import experts_reference
from hetero_ee_kernels.expert_pairs import pairs_of
from hetero_ee_kernels.experts import add_experts, expert_matmul
from hetero_ee_kernels.matmul import matmul
from hetero_ee_kernels.tile_matrix import GCN, TileMatrix
from tests.gpu.interpreted.test_gpu_segment import (
    INT8_ACTIVATIONS,
    MAX_TOKENS,
    PROMPT,
    embedded,
    model_of,
    operations,
    run,
    segment,
    squared_error,
)
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, random
from tests.gpu_tiles import activations, nmse, random_matrix

N_ROWS, N_COLUMNS = 48, 64
KINDS = ("codebook", "zeros", "int8")
# Tokens, choices of each, first expert here and number of experts here, of 5.
FEW, SOME, MANY = (3, 2, 1, 3), (18, 2, 1, 4), (20, 2, 0, 1)


def drawn_routes(m: int, n_active: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(m)
    ids = torch.stack([torch.randperm(5, generator=draw)[:n_active].sort(descending=True).values for _ in range(m)])
    return torch.cat([ids.float(), torch.rand(m, n_active, generator=draw)], 1).to(DEVICE)


def of_expert(weight: TileMatrix, expert: int) -> TileMatrix:
    blocks = slice(expert * N_ROWS // 16, (expert + 1) * N_ROWS // 16)
    return weight.with_tiles(weight.tiles[blocks], weight.scales[blocks])


def check(weight: TileMatrix, sizes: tuple[int, int, int, int], n_tokens: int, *, is_gathered: bool = True) -> None:
    """Compare a product with those of the experts alone, for the first and the last token."""
    m, n_active, start, n_experts = sizes
    routes, x = drawn_routes(m, n_active), activations(1, m if is_gathered else m * n_active, N_COLUMNS)
    bias, out = random(2, n_experts * N_ROWS), Guarded((m * n_active, N_ROWS))
    pairs = pairs_of(routes, start, n_experts, weight)
    assert pairs.n_tokens == n_tokens
    assert expert_matmul(x, weight, pairs, out.tensor, bias) is out.tensor
    for pair, expert in enumerate((routes[:, :n_active].flatten() - start).int().tolist()):
        row = out.tensor[pair]
        if not 0 <= expert < n_experts:
            assert row.isnan().all(), "another device's pair was written"
        elif pair // n_active in (0, m - 1):
            own = x[pair // n_active] if is_gathered else x[pair]
            alone = matmul(own[None].clone(), of_expert(weight, expert))[0]
            assert_same_bits(row, alone + bias[expert * N_ROWS : (expert + 1) * N_ROWS])
    expected = torch.full_like(out.check(), float("nan"))
    experts_reference.expert_matmul(x, weight, pairs, expected, bias)
    is_here = ~expected.isnan()
    assert torch.equal(is_here, ~out.tensor.isnan())
    assert nmse(out.tensor[is_here], expected[is_here]) <= 1e-9


@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_a_decode_pass(kind: str, is_gathered: bool) -> None:
    check(random_matrix(kind, (3 * N_ROWS, N_COLUMNS)), FEW, 1, is_gathered=is_gathered)


@pytest.mark.parametrize(("n_terms", "n_tokens"), [(1, 16), (2, 32)])
@pytest.mark.sample(1)
def test_a_prompt(n_terms: int, n_tokens: int) -> None:
    check(random_matrix("codebook", (4 * N_ROWS, N_COLUMNS), n_terms=n_terms), SOME, n_tokens)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_of_an_expert(kind: str) -> None:
    check(random_matrix(kind, (N_ROWS, N_COLUMNS)), MANY, 32)


@pytest.mark.full
def test_amd_cards_multiply_pair_by_pair() -> None:
    weight = random_matrix("linear", (4 * N_ROWS, N_COLUMNS))
    weight.isa = GCN
    check(weight, SOME, 1)


def test_sums_are_added_from_the_highest_expert_to_the_lowest() -> None:
    """In two parts, as on two devices, with the bits of one."""
    m, n_active, width = 3, 4, 520
    routes, outputs = drawn_routes(m, n_active), random(1, m * n_active, width)
    whole, higher, both = (Guarded((m, width)) for _ in range(3))
    add_experts(outputs, routes, 0, 5, None, whole.tensor)
    add_experts(outputs, routes, 2, 3, None, higher.tensor)
    add_experts(outputs, routes, 0, 2, higher.check(), both.tensor)
    assert_same_bits(both.check(), whole.check())
    assert_same_bits(
        experts_reference.add_experts(outputs, routes, 0, 5, None, torch.empty_like(both.tensor)), both.tensor
    )
    total = torch.zeros(width, device=DEVICE)
    for place in range(n_active):
        total = total + outputs[n_active + place] * routes[1, n_active + place]
    assert_same_bits(both.tensor[1], total)


def test_what_does_not_fit_is_refused() -> None:
    weight, routes = random_matrix("linear", (2 * N_ROWS, N_COLUMNS)), drawn_routes(3, 2)
    pairs, x = pairs_of(routes, 0, 2, weight), random(0, 4, N_COLUMNS)
    with pytest.raises(ValueError, match="do not fit"):
        expert_matmul(x, weight, pairs, torch.empty(6, N_ROWS, device=DEVICE))
    with pytest.raises(ValueError, match="outputs is"):
        add_experts(x, routes, 0, 2, None, torch.empty(3, N_COLUMNS, device=DEVICE))


@pytest.mark.full
def test_layers_are_those_of_the_executor_but_for_int8_activations(tmp_path: Path) -> None:
    """A prompt and a token through two layers with experts."""
    changes: dict[str, Any] = {"hidden_size": 32, "num_experts": 4, "moe_intermediate_size": 16}
    model = model_of("qwen3-moe", tmp_path, **changes)
    part, executor = segment(model, ops=operations("torch")), ReferenceExecutor(*model, MAX_TOKENS, BatchedTorchOps())
    for owner in (part, executor):
        owner.cache.open(0)
    for first, tokens in ((0, PROMPT[:3]), (3, PROMPT[3:4])):
        batch = Batch.of_sequence(0, first, tokens)
        assert embedded(model, batch).shape == (len(tokens), 32)
        assert squared_error(run(part, model, batch), executor.hidden(batch)) <= INT8_ACTIVATIONS
