"""A draft head on the CPU kernels against the same head in plain torch."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.layers.ops import LOGITS
from hetero_ee.ops.cpu import CpuOps
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadLayer
from hetero_ee.weights.quantizers import quantize
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from tests.draft_heads import HIDDEN, VOCAB, BareTarget, draft_head_layer, head_source, head_weights, random_text
from tests.draft_sources import taken

N_TOKENS, MAX_TOKENS = 20, 64
TOKENS, STATES = random_text(N_TOKENS)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(2)
    yield pool
    pool.close()


def guessed(layer: DraftHeadLayer, chunks: Sequence[int]) -> Tensor:
    """The guesses of a whole text, taken in chunks of rows."""
    sequence, found, first = layer.cache.open_new(), [], 0
    for n_rows in chunks:
        end = first + n_rows
        embedded = layer.embed(TOKENS[first:end])
        if embedded is None:
            embedded = BareTarget().embedding[TOKENS[first:end]]
        found.append(layer.guess(embedded, STATES[first:end], Batch.of_sequence(sequence, first, TOKENS[first:end])))
        first = end
    layer.cache.close(sequence)
    return torch.cat(found)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("quantizer", "tolerance"), [("int8", 0.02), ("codebook", 0.2)])
def test_it_computes_what_the_reference_does(pool: ThreadPool, quantizer: str, tolerance: float) -> None:
    """The rest is quantization: of weights and activations to 8 bits, or of weights to 4."""
    weights = head_weights(qkv_bias=torch.linspace(-1, 1, 80), embedding=BareTarget(seed=8).embedding)
    layer = draft_head_layer(weights, MAX_TOKENS, pool, quantizer=quantizer)
    expected = guessed(draft_head_layer(weights, MAX_TOKENS), [N_TOKENS])
    error = relative_error(guessed(layer, [N_TOKENS]), expected)
    assert 0 < error < tolerance


def test_a_rows_bits_do_not_depend_on_its_batch(pool: ThreadPool) -> None:
    layer = draft_head_layer(head_weights(), MAX_TOKENS, pool)
    whole = guessed(layer, [N_TOKENS])
    for chunks in ([1] * N_TOKENS, [3, 1, 9, 7]):
        assert torch.equal(guessed(layer, chunks), whole)


@pytest.mark.parametrize("ids", [[2, 5, 17], [0, 15, 16, VOCAB - 1], list(range(VOCAB)), [9]])
def test_gathered_rows_give_the_whole_heads_logits_bit_by_bit(pool: ThreadPool, ids: list[int]) -> None:
    head = quantize(BareTarget().head, "int8")
    gathered = head.gathered(torch.tensor(ids))
    assert gathered.shape == (len(ids), HIDDEN) and torch.equal(gathered.dequantize(), head.dequantize()[ids])
    ops = CpuOps(pool)
    whole, some = (ops.linear(STATES.numpy(), ops.matrix("head", weight, None), LOGITS) for weight in (head, gathered))
    assert np.array_equal(some, whole[:, ids])


def test_after_a_rollback_it_drafts_as_a_fresh_one_does(pool: ThreadPool) -> None:
    def source() -> DraftHeadSource:
        return head_source(draft_head_layer(head_weights(), MAX_TOKENS, pool), BareTarget())

    used, fresh = source(), source()
    wrong, wrong_states = random_text(N_TOKENS, seed=5)
    used.observe(0, 0, TOKENS[:8], STATES[:8])
    taken(used, TOKENS[:9], 6)
    used.observe(0, 8, wrong[:7], wrong_states[:7])
    taken(used, [*TOKENS[:8], *wrong[:7], 3], 6)
    used.truncate(0, 8)
    for first in range(8, 16, 2):
        used.observe(0, first, TOKENS[first : first + 2], STATES[first : first + 2])
    fresh.observe(0, 0, TOKENS[:16], STATES[:16])
    logits: list[list[Tensor]] = [[], []]
    for number, one in enumerate((used, fresh)):
        taken(one, TOKENS[:17], 5, lambda found, history, n=number: logits[n].append(found) or int(found.argmax()))
    assert len(logits[0]) == 5 and all(map(torch.equal, *logits))


def test_it_has_the_shapes_it_says(pool: ThreadPool) -> None:
    layer = draft_head_layer(head_weights(embedding=BareTarget().embedding), MAX_TOKENS, pool)
    embedded = layer.embed([3, VOCAB - 1])
    assert embedded is not None and embedded.shape == (2, HIDDEN)
    assert relative_error(embedded, BareTarget().embedding[[3, VOCAB - 1]]) < 0.02


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_whose_head_is_no_number_gets_no_drafts(pool: ThreadPool, broken: float) -> None:
    target, notices = BareTarget(), list[str]()
    target.head[VOCAB // 2, 5] = broken
    source = head_source(draft_head_layer(head_weights(), MAX_TOKENS, pool), target, warn=notices.append)
    source.observe(0, 0, TOKENS, STATES)
    for _ in range(2):
        assert taken(source, [*TOKENS, 4], 3) == []
    assert len(notices) == 1
