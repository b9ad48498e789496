"""Operations of mixtures of experts: each output has the bits that it has alone; choices and sums are torch's."""

from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.layers.moe import OF_CHOSEN, SIGMOID, SOFTMAX, RouterSpec
from hetero_ee.layers.ops import Activation, Experts, Router
from hetero_ee.ops.cpu import CpuOps
from hetero_ee.ops.torch_ops import TorchMatrix, TorchOps
from hetero_ee.weights.gguf_blocks import MXFP4_CODEBOOK
from hetero_ee.weights.weight import TileWeight
from hetero_ee_cpu_ops import expert_ffn, grouped_matmul
from hetero_ee_cpu_ops.activate import activate
from hetero_ee_cpu_ops.expert_ffn import ExpertFfn
from hetero_ee_cpu_ops.expert_pairs import MIN_SHARED_VALUES, Pairs, pairs_of
from hetero_ee_cpu_ops.grouped_matmul import ExpertMatrix, GroupedMatmul
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.matmul import Matmul
from hetero_ee_cpu_ops.route import TILE, RouterRule, gate_rows, route
from tests.cpu.test_matmul import KINDS, Case
from tests.cpu_support import GuardedAllocations, assert_close, assert_same_bits

N_EXPERTS, ROWS, HIDDEN = 7, 48, 80  # rows of an expert's matrix; features of a token


def drawn_routes(m: int, n_active: int, seed: int = 0, n_experts: int = N_EXPERTS) -> Any:
    """Different experts for each token, from the highest to the lowest, and weights."""
    draw = np.random.default_rng(seed)
    chosen = np.stack([np.sort(draw.permutation(n_experts)[:n_active])[::-1] for _ in range(m)])
    return np.concatenate([chosen, draw.random((m, n_active))], 1).astype(np.float32)


@pytest.fixture(scope="module")
def matmul() -> Matmul:
    return Matmul(ThreadPool(1))


def grouped(matmul: Matmul, threads: int = 1) -> GroupedMatmul:
    return GroupedMatmul(ThreadPool(threads))


def of_experts(matmul: Matmul, case: Case, n_rows: int, start: int = 0, n: int = N_EXPERTS) -> ExpertMatrix:
    return ExpertMatrix(matmul, case.matrix(), start * n_rows, n_rows, n)


@pytest.mark.parametrize("n_terms", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_bits_of_each_experts_own_product(matmul: Matmul, kind: str, n_terms: int) -> None:
    case = Case.random(kind, (N_EXPERTS * ROWS, 80), 37, n_terms=n_terms)
    routes = drawn_routes(37, 3)
    for start, n_experts in ((0, N_EXPERTS), (2, 3)):
        pairs = pairs_of(routes, start, n_experts)
        found = grouped(matmul)(case.x, of_experts(matmul, case, ROWS, start, n_experts), pairs, gather=True)
        assert len(found) == ((routes[:, :3] >= start) & (routes[:, :3] < start + n_experts)).sum()
        for token, places in enumerate(pairs.places):
            for place, expert in zip(places, routes[token].astype(int), strict=False):
                if place >= 0:
                    x = case.x[token : token + 1]
                    assert_same_bits(found[place], matmul.rows(x, case.matrix(), expert * ROWS, ROWS)[0])
                assert (place >= 0) == (start <= expert < start + n_experts)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_other_tokens_change_no_bit(matmul: Matmul, kind: str) -> None:
    case = Case.random(kind, (N_EXPERTS * 2048, 320), 150)
    routes = drawn_routes(150, 3)
    pairs = pairs_of(routes, 0, N_EXPERTS)
    matrix = of_experts(matmul, case, 2048)
    alone = grouped(matmul)(case.x, matrix, pairs, gather=True)
    assert_same_bits(grouped(matmul, threads=3)(case.x, matrix, pairs, gather=True), alone)
    few = slice(5, 9)
    fewer = pairs_of(routes[few], 0, N_EXPERTS)
    part = grouped(matmul, threads=3)(case.x[few], matrix, fewer, gather=True)
    assert_same_bits(part[fewer.places.ravel()], alone[pairs.places[few].ravel()])


def test_mxfp4_experts_of_gpt_oss_s_shape() -> None:
    """2,880 columns are 90 groups, which neither devices' steps nor pages divide."""
    n, width, draw = 3, 2880, torch.Generator().manual_seed(0)
    tiles = torch.randint(0, 256, (n * width // 16, width // 32, 256), generator=draw, dtype=torch.uint8)
    scales = 2.0 ** torch.randint(-4, 3, (*tiles.shape[:2], 16), generator=draw)
    weight = TileWeight(tiles, scales.half(), -9, MXFP4_CODEBOOK, n * width, width, n_terms=2)
    ops, routes = CpuOps(ThreadPool(1)), drawn_routes(2, 2, n_experts=n)
    x = np.random.default_rng(0).standard_normal((2, width), np.float32)

    def summed(ops: Any, matrix: Any, *arrays: Any) -> Any:
        experts = Experts(matrix, matrix, Activation("relu", 0.0, False), width, width, n)
        return ops.expert_sums(*arrays, experts, None)

    expected = summed(TorchOps(), TorchMatrix(weight, None), torch.from_numpy(x), torch.from_numpy(routes)).numpy()
    found = summed(ops, ops.matrix("experts", weight, None), x, routes)
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)


def test_rows_of_pairs_are_multiplied_without_gathering(matmul: Matmul) -> None:
    case = Case.random("codebook", (N_EXPERTS * ROWS, 64), 12)
    pairs = pairs_of(drawn_routes(12, 2), 0, N_EXPERTS)
    gathered = np.ascontiguousarray(case.x[pairs.rows])
    matrix = of_experts(matmul, case, ROWS)
    expected = grouped(matmul)(case.x, matrix, pairs, gather=True)
    assert_same_bits(grouped(matmul)(gathered, matrix, pairs, gather=False), expected)


class Ffns:
    """The FFNs of N_EXPERTS experts with random weights and biases, and what they compute, step by step."""

    def __init__(self, matmul: Matmul, kind: str, size: int = 48, *, gated: bool = True, has_bias: bool = True) -> None:
        self.matmul, self.size, self.gated = matmul, size, gated
        self.rows = size * (2 if gated else 1), HIDDEN
        shapes = zip(self.rows, (HIDDEN, size), strict=True)
        self.cases = [Case.random(kind, (N_EXPERTS * n, width), 1, seed=width) for n, width in shapes]
        draw = np.random.default_rng(3)
        self.biases = [draw.standard_normal(N_EXPERTS * n, np.float32) if has_bias else None for n in self.rows]

    def operation(self, start: int = 0, n: int = N_EXPERTS, threads: int = 1) -> ExpertFfn:
        matrices = []
        for case, n_rows, bias in zip(self.cases, self.rows, self.biases, strict=True):
            own = None if bias is None else bias[start * n_rows : (start + n) * n_rows]
            matrices.append(ExpertMatrix(self.matmul, case.matrix(), start * n_rows, n_rows, n, own))
        return ExpertFfn(ThreadPool(threads), *matrices, start, "silu", gated=self.gated)

    def expected(self, x: Any, routes: Any, start: int, n: int, sums: Any) -> Any:
        """Compute one expert of one token at a time; each product is rounded before it is added."""
        total = np.zeros((len(x), HIDDEN), np.float32) if sums is None else sums.copy()
        for token in range(len(x)):
            for expert, weight in routes[token].reshape(2, -1).T:
                if start <= expert < start + n:
                    inner = self._product(0, x[token : token + 1], int(expert))
                    active = activate(inner, "silu", gated=self.gated)
                    total[token] += self._product(1, active, int(expert))[0] * weight
        return total

    def _product(self, number: int, x: Any, expert: int) -> Any:
        n_rows, bias = self.rows[number], self.biases[number]
        product = self.matmul.rows(x, self.cases[number].matrix(), expert * n_rows, n_rows)
        return product if bias is None else product + bias[expert * n_rows : (expert + 1) * n_rows]


@pytest.mark.parametrize("m", [1, 2, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_have_the_bits_of_each_expert_s_own_ffn(matmul: Matmul, kind: str, m: int) -> None:
    for gated, has_bias in ((True, True), (False, False)):
        ffns = Ffns(matmul, kind, gated=gated, has_bias=has_bias)
        x, routes = np.random.default_rng(m).standard_normal((m, HIDDEN), np.float32), drawn_routes(m, 3)
        expected = ffns.expected(x, routes, 0, N_EXPERTS, None)
        assert_same_bits(ffns.operation(threads=3)(x, routes), expected)
        for cut in (0, 2, N_EXPERTS):
            higher = ffns.operation(cut, N_EXPERTS - cut)(x, routes) if cut < N_EXPERTS else np.zeros_like(expected)
            assert_same_bits(higher, ffns.expected(x, routes, cut, N_EXPERTS - cut, None))
            if cut:
                assert_same_bits(ffns.operation(0, cut)(x, routes, higher), expected)


def test_large_sums_are_shared_without_a_change_of_bits(matmul: Matmul) -> None:
    m = MIN_SHARED_VALUES // (2 * HIDDEN) + 3
    ffns, routes = Ffns(matmul, "codebook", size=64), drawn_routes(m, 2)
    x = np.random.default_rng(1).standard_normal((m, HIDDEN), np.float32)
    together = ffns.operation(threads=3)(x, routes)
    assert_same_bits(together, ffns.operation()(x, routes))
    for token in (0, m - 1):
        assert_same_bits(together[token], ffns.operation()(x[token : token + 1], routes[token : token + 1])[0])


def test_nothing_is_written_beside_the_output(matmul: Matmul, monkeypatch: pytest.MonkeyPatch) -> None:
    ffns, routes, x = Ffns(matmul, "codebook"), drawn_routes(9, 3), np.ones((9, HIDDEN), np.float32)
    pairs = pairs_of(routes, 0, N_EXPERTS)
    matrix, operation = of_experts(matmul, ffns.cases[0], ffns.rows[0]), ffns.operation(threads=2)
    allocated = GuardedAllocations()
    for module in (grouped_matmul, expert_ffn):
        monkeypatch.setattr(module.np, "empty", allocated.empty)
    grouped(matmul, threads=2)(x, matrix, pairs, gather=True)
    operation(x, routes)
    assert len(allocated.arrays) >= 6
    allocated.check()


def test_a_batch_without_any_of_these_experts_has_no_outputs(matmul: Matmul) -> None:
    case, routes = Case.random("codebook", (N_EXPERTS * ROWS, 80), 2), drawn_routes(2, 2, n_experts=4)
    pairs = pairs_of(routes, 6, 1)
    assert len(grouped(matmul)(case.x, of_experts(matmul, case, ROWS), pairs, gather=True)) == 0
    sums = np.random.default_rng(0).standard_normal((2, HIDDEN), np.float32)
    none_of_them = Ffns(matmul, "codebook").operation(6, 1)
    assert_same_bits(none_of_them(np.ones((2, HIDDEN), np.float32), routes, sums), sums)


def test_shapes_that_do_not_fit_are_refused(matmul: Matmul) -> None:
    case, pairs = Case.random("codebook", (3 * ROWS, 80), 4), pairs_of(drawn_routes(4, 2), 0, N_EXPERTS)
    multiply, tiles = grouped(matmul), case.matrix()
    for first, n_rows, n in ((0, ROWS, 4), (8, ROWS, 1), (0, 40, 3), (16, ROWS, 3)):
        with pytest.raises(ValueError, match=f"{n} experts of {n_rows} rows from {first} on do not fit 9 blocks"):
            ExpertMatrix(matmul, tiles, first, n_rows, n)
    matrix = of_experts(matmul, case, ROWS, n=3)
    with pytest.raises(ValueError, match="Expert 5 is not among 3"):
        multiply(case.x, matrix, pairs, gather=True)
    with pytest.raises(ValueError, match="4 rows of activations do not fit 8 pairs"):
        multiply(case.x, matrix, pairs_of(drawn_routes(4, 2, n_experts=3), 0, 3), gather=False)
    operation, x = Ffns(matmul, "codebook").operation(), np.ones((4, HIDDEN), np.float32)
    for routes, sums in ((drawn_routes(3, 2), None), (drawn_routes(4, 2), np.zeros((4, 16), np.float32))):
        with pytest.raises(ValueError, match="do not fit 4 rows"):
            operation(x, routes, sums)
    with pytest.raises(ValueError, match="do not fit"):
        ExpertFfn(ThreadPool(1), matrix, matrix, 0, "silu", gated=True)


def test_pairs_are_in_order_of_experts_and_tokens() -> None:
    routes = np.array([[3, 1, 0.5, 0.5], [1, 0, 0.5, 0.5], [3, 0, 0.5, 0.5]], np.float32)
    pairs: Pairs = pairs_of(routes, 0, 4)
    assert pairs.experts.tolist() == [0, 1, 3]
    assert pairs.starts.tolist() == [0, 2, 4, 6]
    assert pairs.rows.tolist() == [1, 2, 0, 1, 0, 2]
    assert pairs.places.tolist() == [[4, 2], [3, 0], [5, 1]]


def rule_of(
    weights: Any,
    n_active: int,
    kind: str,
    *biases: Any,
    renormalizes: bool = False,
    scale: float = 1.0,
    added: float = 0.0,
) -> Any:
    vectors = (*biases, None, None, None)[:3]
    return RouterRule(weights, vectors, n_active, kind, renormalizes=renormalizes, scale=scale, added=added)


@pytest.mark.parametrize("m", [1, 3, 4, 2 * TILE + 5])
@pytest.mark.parametrize("n_experts", [5, 8, 128, 2 * TILE + 11])
@pytest.mark.parametrize("kind", [SOFTMAX, SIGMOID, OF_CHOSEN])
def test_routes_are_those_of_torch(kind: str, n_experts: int, m: int) -> None:
    draw = np.random.default_rng(n_experts + m)
    weights, x = (draw.standard_normal((n, 64), np.float32) * 0.3 for n in (n_experts, m))
    biases = (None,) * 3, tuple(draw.standard_normal((3, n_experts), np.float32))
    for n_active, renormalizes, scale, vectors in ((1, False, 1.0, biases[0]), (4, True, 2.5, biases[1])):
        rule = rule_of(weights, n_active, kind, *vectors, renormalizes=renormalizes, scale=scale)
        found = route(x, rule, ThreadPool(2))
        spec = RouterSpec(n_experts=n_experts, n_active=n_active, scores=kind, renormalizes=renormalizes, scale=scale)
        tensors = [None if each is None else torch.from_numpy(each) for each in (weights, *vectors)]
        expected = TorchOps().route(torch.from_numpy(x), Router(spec, *tensors)).numpy()
        assert np.array_equal(found[:, :n_active], expected[:, :n_active])
        assert_close(found, expected, 1e-5)


def test_weights_that_are_bf16_are_read_as_such_with_the_bits_of_fp32() -> None:
    draw = np.random.default_rng(0)
    bits, x = draw.standard_normal((43, 96), np.float32).view(np.uint32) & 0xFFFF0000, draw.standard_normal((39, 96))
    short, x = bits.view(np.float32), x.astype(np.float32)
    longer = short.copy()
    longer[0] *= np.float32(1 + 2**-12)  # never chosen: its logit is far below the others'
    vectors = np.where(np.arange(43) == 0, np.float32(-1e6), np.float32(0)).astype(np.float32)
    rules = [rule_of(weights, 8, SIGMOID, None, vectors) for weights in (short, longer)]
    assert [rule.is_bf16 for rule in rules] == [True, False]
    for m in (1, 39):
        assert_same_bits(*(route(x[:m], rule, ThreadPool(2)) for rule in rules))


def test_a_tokens_route_does_not_depend_on_its_batch_or_threads() -> None:
    draw = np.random.default_rng(0)
    weights, x = draw.standard_normal((43, 96), np.float32), draw.standard_normal((39, 96), np.float32)
    rule = rule_of(weights, 8, SOFTMAX, renormalizes=True)
    together = route(x, rule, ThreadPool(1))
    assert_same_bits(route(x, rule, ThreadPool(3)), together)
    for token in range(len(x)):
        assert_same_bits(route(x[token : token + 1], rule, ThreadPool(1))[0], together[token])


def test_the_lower_of_two_experts_with_equal_scores_is_chosen() -> None:
    weights = np.zeros((20, 16), np.float32)
    weights[:, 0] = [1, 2, 1, 1, 2, 1, *[0] * 14]
    x = np.eye(1, 16, dtype=np.float32)
    assert route(x, rule_of(weights, 4, SOFTMAX), ThreadPool(1))[0, :4].tolist() == [4, 2, 1, 0]
    assert route(np.zeros_like(x), rule_of(weights, 3, SIGMOID), ThreadPool(1))[0, :3].tolist() == [2, 1, 0]


def test_a_token_that_is_not_a_number_gets_experts_that_exist_and_weights_that_are_not_numbers() -> None:
    x = np.full((2, 16), np.nan, np.float32)
    for kind in (SOFTMAX, SIGMOID, OF_CHOSEN):
        found = route(x, rule_of(np.ones((9, 16), np.float32), 4, kind), ThreadPool(1))
        assert all(
            sorted(set(row), reverse=True) == row and 0 <= min(row) <= max(row) < 9 for row in found[:, :4].tolist()
        )
        assert np.isnan(found[:, 4:]).all()


def test_routes_and_gates_refuse_shapes_that_do_not_fit() -> None:
    weights = np.zeros((9, 32), np.float32)
    for x, n_active in ((np.zeros((2, 16), np.float32), 2), (np.zeros((2, 32), np.float32), 10)):
        with pytest.raises(ValueError, match="do not fit"):
            route(x, rule_of(weights, n_active, SOFTMAX), ThreadPool(1))
    with pytest.raises(ValueError, match="do not fit"):
        gate_rows(np.zeros((2, 32), np.float32), np.zeros((3, 32), np.float32), weights[:1], ThreadPool(1))


def test_rows_are_gated_as_torch_does() -> None:
    draw = np.random.default_rng(0)
    x, inputs, weights = (draw.standard_normal(shape, np.float32) for shape in ((19, 48), (19, 64), (1, 64)))
    expected = TorchOps().gate_rows(*map(torch.from_numpy, (x, inputs, weights))).numpy()
    alone = gate_rows(x[7:8].copy(), inputs[7:8], weights, ThreadPool(1))
    found = gate_rows(x, inputs, weights, ThreadPool(2))
    assert found is x
    assert_close(found, expected, 1e-5)
    assert_same_bits(found[7:8], alone)


def test_torch_computes_an_expert_as_a_dense_ffn() -> None:
    """The reference's own reference: each token's experts as matrices cut out of those of all."""
    torch.manual_seed(0)
    n_experts, size, hidden = 4, 16, 32
    first, down = torch.randn(n_experts * 2 * size, hidden), torch.randn(n_experts * hidden, size)
    biases = torch.randn(len(first)), torch.randn(len(down))

    from hetero_ee.weights.weight import DenseWeight

    matrices = (TorchMatrix(DenseWeight(each), bias) for each, bias in zip((first, down), biases, strict=True))
    experts = Experts(*matrices, Activation("silu", 0.0, True), 2 * size, hidden, n_experts)
    x, routes = torch.randn(6, hidden), torch.from_numpy(drawn_routes(6, 2, n_experts=n_experts))
    found = TorchOps().expert_sums(x, routes, experts, None)
    for token, row in enumerate(routes):
        expected = torch.zeros(hidden)
        for expert, weight in zip(row[:2].int().tolist(), row[2:], strict=True):
            rows = slice(expert * 2 * size, (expert + 1) * 2 * size)
            gate, up = (first[rows] @ x[token] + biases[0][rows]).chunk(2)
            rows = slice(expert * hidden, (expert + 1) * hidden)
            expected += weight * (down[rows] @ (torch.nn.functional.silu(gate) * up) + biases[1][rows])
        assert_close(found[token].numpy(), expected.numpy(), 1e-5)


def test_weights_whose_sum_is_zero_stay_finite() -> None:
    weights = np.full((9, 16), -20.0, np.float32)
    how = {"renormalizes": True, "scale": 2.0, "added": 1e-6}
    rule = rule_of(weights, 4, SIGMOID, **how)
    spec = RouterSpec(n_experts=9, n_active=4, scores=SIGMOID, **how)
    for value in (1.0, 0.05, 0.0):
        x = np.full((1, 16), value, np.float32)
        found = route(x, rule, ThreadPool(1))
        expected = TorchOps().route(torch.from_numpy(x), Router(spec, torch.from_numpy(weights), None, None)).numpy()
        assert found[0, :4].tolist() == [3, 2, 1, 0]
        assert found[0, 4:] == pytest.approx(expected[0, 4:], rel=1e-5, abs=1e-30)
