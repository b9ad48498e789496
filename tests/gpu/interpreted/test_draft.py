"""Drafts from logits: the token with NumPy's noise, the lowest id of equals, no token where a logit is not finite; the
network against float64, 1e-5 of a probability."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hetero_ee.layers.decoder import LogitsSpec
from hetero_ee.layers.ops import Norm
from hetero_ee.ops.gpu import GpuOps
from hetero_ee.ops.gpu_operations import gpu_operations
from hetero_ee.ops.registry import Registry
from hetero_ee.runtime.choice import gumbel_noise
from hetero_ee.runtime.draft_logits import DraftLogits
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise, StateMap, noise_words
from hetero_ee.runtime.gpu.draft_end import GpuDraftEnd
from hetero_ee.weights.quantizers import quantize
from hetero_ee_kernels import reference
from hetero_ee_kernels.checks import UNFUSED
from hetero_ee_kernels.draft import PIECE, draft
from hetero_ee_kernels.noise import row_bits, scaled_gumbel
from hetero_ee_kernels.tile_matrix import instructions
from tests.gpu_support import DEVICE, Guarded, random

NAN, INF, TOLERANCE = float("nan"), float("inf"), 1e-5
GREEDY = DraftNoise(0.0, 0, 0, 0)


@triton.jit
def bits_kernel(
    words_ptr: tl.tensor, ids_ptr: tl.tensor, bits_ptr: tl.tensor, first: tl.tensor, n: tl.constexpr
) -> None:
    tl.store(bits_ptr + tl.arange(0, n), row_bits(words_ptr, ids_ptr, first, first + n, n).to(tl.int64))


@triton.jit
def gumbel_kernel(bits_ptr: tl.tensor, noise_ptr: tl.tensor, n: tl.constexpr, ISA: tl.constexpr) -> None:  # noqa: N803
    at = tl.arange(0, n)
    noise = scaled_gumbel(tl.load(bits_ptr + at).to(tl.uint64), ISA)
    tl.store(noise_ptr + at, tl.fma(noise, 0.6931471805599453, 0.36651292058166435))  # ln 2, -ln(ln 2)


@pytest.mark.parametrize("first", [0, 4096])
@pytest.mark.parametrize(
    ("seed", "sequence", "position"), [(0, 0, 0), (2**64 - 1, 3, 70000), (2**63, 2**31 - 1, 1), (12345, 1, 2**31 - 1)]
)
def test_the_noise_is_numpys(seed: int, sequence: int, position: int, first: int) -> None:
    n = 4096
    words = noise_words([DraftNoise(1.0, seed, sequence, position)]).to(DEVICE)
    key, counter = (np.array(words, np.uint64) for words in ((seed, 0), (0, 0, sequence, position)))
    expected = np.random.Philox(key=key, counter=counter).random_raw(first + n)[first:]
    for ids in (None, torch.arange(first + n, dtype=torch.int32, device=DEVICE)):
        bits, noise = torch.zeros(n, dtype=torch.int64, device=DEVICE), torch.zeros(n, device=DEVICE)
        bits_kernel[(1,)](words, ids, bits, first, n)
        assert (bits.cpu().numpy().view(np.uint64) == expected).all()
    gumbel_kernel[(1,)](bits, noise, n, ISA=instructions(bits), **UNFUSED)
    known = gumbel_noise(first + n, seed, sequence, position)[first:]
    assert (noise.cpu().double() - known).abs().max() <= 1e-6 * known.abs().max()


def test_the_noise_is_finite_and_accurate_at_its_ends() -> None:
    series_begins = 2**52 - 2**48
    high = [0, 2**51 - 1, 2**51, series_begins - 1, series_begins, 2**52 - 2**20, 2**52 - 2, 2**52 - 1]
    bits = torch.from_numpy(np.array([each << 12 for each in high], np.uint64).view(np.int64)).to(DEVICE)
    found = torch.zeros(len(high), device=DEVICE)
    gumbel_kernel[(1,)](bits, found, len(high), ISA=instructions(bits), **UNFUSED)
    expected = [-np.log(-np.log1p(-float(2**53 - 1 - 2 * each) / 2**53)) for each in high]
    assert np.allclose(found.cpu().numpy(), expected, rtol=1e-6, atol=1e-6)


def drafted(logits: Any, noise: list[DraftNoise], network: Any = None, ids: Any = None) -> list[tuple[int, float]]:
    """Of the kernel, once plain torch agrees."""
    out, words = Guarded((len(logits), 2), torch.int32), noise_words(noise).to(DEVICE)
    assert draft(logits, words, network, ids, out.tensor) is out.tensor
    found, expected = pairs(out.check()), pairs(reference.draft(logits, words, network, ids))
    assert [token for token, _ in found] == [token for token, _ in expected]
    sound = [row for row, (token, _) in enumerate(found) if token >= 0]
    assert all(abs(found[row][1] - expected[row][1]) <= TOLERANCE for row in sound)
    return found


def pairs(out: torch.Tensor) -> list[tuple[int, float]]:
    out = out.cpu()
    return list(zip(out[:, 0].tolist(), out[:, 1].contiguous().view(torch.float32).tolist(), strict=True))


@pytest.mark.parametrize("n", [1, 2, 100, PIECE, PIECE + 1, 3 * PIECE - 5])
def test_the_largest_and_its_probability(n: int) -> None:
    logits = random(n, 3, n, scale=3.0)
    found = drafted(logits, [GREEDY] * 3)
    softmax = torch.softmax(logits.double(), 1).cpu()
    assert [token for token, _ in found] == logits.cpu().numpy().argmax(1).tolist()
    assert all(abs(sure - softmax[row, token]) <= TOLERANCE for row, (token, sure) in enumerate(found))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_token_that_sampling_draws(temperature: float) -> None:
    n, noise = 2 * PIECE + 77, [DraftNoise(temperature, 2**64 - 5 + row, row, 9 * row) for row in range(4)]
    logits = random(3, 4, n, scale=3.0)
    found = drafted(logits, noise)
    for row, (token, _) in zip(range(4), found, strict=True):
        one = noise[row]
        drawn = gumbel_noise(n, one.seed, one.sequence, one.position)
        assert token == int((logits[row].double().cpu() / temperature + drawn).argmax())


@pytest.mark.parametrize("temperature", [1e-30, 1e-7])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    logits = random(4, 1, 300)
    assert drafted(logits, [DraftNoise(temperature, 1, 1, 1)])[0][0] == int(logits[0].argmax())


def test_a_draft_vocabulary_has_its_tokens_noise() -> None:
    n, one = 9000, DraftNoise(1.0, 7, 1, 30)
    ids = torch.arange(5, n, 3, dtype=torch.int32, device=DEVICE)
    logits = random(5, 1, len(ids), scale=2.0)
    drawn = gumbel_noise(n, one.seed, one.sequence, one.position)[ids.cpu().long()]
    expected = int(ids[(logits[0].double().cpu() + drawn).argmax()])
    assert drafted(logits, [one], None, ids)[0][0] == expected
    assert drafted(logits, [GREEDY], None, ids)[0][0] == int(ids[logits[0].argmax()])


def test_ties_go_to_the_lowest_id_across_pieces() -> None:
    logits = torch.zeros((3, 2 * PIECE + 3), device=DEVICE)
    logits[0, [PIECE - 1, PIECE, 2 * PIECE + 2]] = 5.0
    logits[1, [2 * PIECE, 2 * PIECE + 1]] = 5.0
    logits[2, 0] = -0.0  # equal to the zeros after it
    assert [token for token, _ in drafted(logits, [GREEDY] * 3)] == [PIECE - 1, 2 * PIECE, 0]


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
def test_logits_that_are_not_finite_draft_nothing_and_stay_in_their_row(bad: float) -> None:
    logits, noise = random(1, 3, PIECE + 10), [GREEDY, DraftNoise(1.0, 1, 2, 3), GREEDY]
    good = drafted(logits, noise)
    for place in (0, PIECE + 9):
        spoiled = logits.clone()
        spoiled[1, place] = bad
        found = drafted(spoiled, noise)
        assert found[1][0] == -1 and (found[0], found[2]) == (good[0], good[2])


def network(seed: int, h: int) -> tuple[torch.Tensor, ...]:
    return random(seed, h, 12), random(seed + 1, h), random(seed + 2, h, scale=h**-0.5), random(seed + 3, 1)


def expected_chance(logits: Any, parts: Any, bug: str = "") -> Any:
    first, first_bias, second, second_bias = (part.double() for part in parts)
    best = torch.topk(logits.double(), 4).values
    softmax = torch.softmax(best, -1)
    order = [softmax, best, softmax] if bug == "order" else [best, softmax, softmax]
    inner = torch.cat(order, -1) @ first.T + (0 if bug == "bias" else first_bias)
    inner = inner if bug == "relu" else inner.clamp(min=0)
    return torch.sigmoid(inner @ second + second_bias)


@pytest.mark.parametrize("bug", ["", "order", "bias", "relu"])
@pytest.mark.parametrize(("n", "h"), [(4, 64), (3 * PIECE - 5, 33), (PIECE + 1, 512)])
def test_the_network_judges_the_four_largest(n: int, h: int, bug: str) -> None:
    logits, parts = random(n, 5, n, scale=2.0), network(h, h)
    if n > PIECE:
        logits[0, 7] = logits[0, 8] = logits[0, PIECE] = logits[0].max() + 1  # equals all count
    sure = torch.tensor([confidence for _, confidence in drafted(logits, [GREEDY] * 5, parts)])
    wrong = float((sure.double() - expected_chance(logits, parts, bug).cpu()).abs().max())
    assert wrong > 10 * TOLERANCE if bug else wrong <= TOLERANCE


@pytest.mark.parametrize(("n_pieces", "h"), [(33, None), (3, 33)])
def test_the_largest_are_found_in_every_thread(n_pieces: int, h: int | None) -> None:
    """The four largest are in threads, and then in pieces, whose numbers differ in one bit only."""
    places = [4 << bit for bit in range(7)] + [PIECE << bit for bit in range(7) if 1 << bit < n_pieces]
    logits = random(5, len(places), n_pieces * PIECE)
    for row in range(len(places)):
        for rank in range(4):
            logits[row, places[(row + rank) % len(places)]] = 9.0 - rank
    found = drafted(logits, [GREEDY] * len(places), None if h is None else network(h, h))
    assert [token for token, _ in found] == places


def test_wrong_arguments_are_refused() -> None:
    logits, words, parts = random(1, 2, 8), noise_words([GREEDY] * 2).to(DEVICE), network(3, 8)
    for wrong in (
        lambda: draft(logits.double(), words),
        lambda: draft(random(1, 2, 16)[:, ::2], words),
        lambda: draft(logits, words[:1]),
        lambda: draft(logits, words.float()),
        lambda: draft(logits[:, :3].contiguous(), words, parts),
        lambda: draft(logits, words, (parts[0][:, :11], *parts[1:])),
        lambda: draft(logits, words, None, torch.arange(7, dtype=torch.int32, device=DEVICE)),
        lambda: draft(logits, words, None, None, torch.empty(2, 3, dtype=torch.int32, device=DEVICE)),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert draft(random(2, 0, 4), words[:0]).shape == (0, 2)


# The whole end: norm, map, head and choice by these kernels.


def end_on(operations: Any, end: DraftEnd, head: Any, recorder: Any = None) -> GpuDraftEnd:
    ops = GpuOps(operations, torch.device(DEVICE))
    norm = None if end.is_normed else Norm("rms", None, None, 1e-5)
    logits = DraftLogits(ops, end, norm, ops.matrix("head", head, None), LogitsSpec(1.0, 0.0))
    return GpuDraftEnd(end, logits, head.n_columns, ops, recorder)


def test_an_end_by_these_kernels_is_that_of_plain_torch() -> None:
    size, n_tokens, rank, m = 64, 90, 8, 3
    up, down = random(1, size, rank, scale=0.1).cpu(), random(2, rank, size, scale=0.1).cpu()
    head = quantize(random(3, n_tokens, size).cpu(), "int8")
    state_map = StateMap(quantize(up, "int8"), quantize(down, "int8"), random(4, size, scale=0.1).cpu())
    judge: Any = SimpleNamespace(network=tuple(part.cpu() for part in network(5, 64)))
    end, hidden = DraftEnd(state_map=state_map, judge=judge), random(6, m, size)
    noise = [GREEDY, DraftNoise(0.8, 3, 0, 9), DraftNoise(1.0, 2**64 - 1, 1, 2)]
    found, expected = (
        end_on(gpu_operations(Registry(lambda name, by=by: name == by), "cuda"), end, head).run(hidden, noise)
        for by in ("triton", "torch")
    )
    assert [token for token, _ in pairs(found)] == [token for token, _ in pairs(expected)]
    assert [sure for _, sure in pairs(found)] == pytest.approx([sure for _, sure in pairs(expected)], abs=1e-4)
    recorded: list[Any] = []

    def recorder(work: Any) -> Any:
        recorded.append(work)
        return work

    replayed = end_on(gpu_operations(Registry(), "cuda"), end, head, recorder)
    for n_rows in (1, m, 1, m):
        assert torch.equal(replayed.run(hidden[:n_rows], noise[:n_rows]), found[:n_rows])
    assert len(recorded) == 2  # for each number of rows once
