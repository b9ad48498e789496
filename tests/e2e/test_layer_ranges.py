"""Rows through any ranges of layers, in any order that keeps each layer's own, have the bits of one whole pass."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.executors.executor import Executor
from tests.device_support import SPEC, round_profile
from tests.e2e.test_families import PROMPT
from tests.emulation import dummy
from tests.executor_support import Model, contents, executor_for, hidden_alone, model_of

MODELS = [
    (family, weights)
    for family in ("llama", "llama-gelu", "mistral", "opt", "phi3-partial", "qwen3")
    for weights in ("fp32", "int4")
]
N_LAYERS = 3
TEXTS = [PROMPT, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16], [100, 101, 100, 101, 100, 101]]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    family, weights = request.param
    model: Model = model_of(family, weights, tmp_path_factory.mktemp(family))
    made = executor_for(model, weights)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(executor: Executor) -> list[torch.Tensor]:
    """Hidden states of each text alone."""
    return [hidden_alone(executor, text) for text in TEXTS]


@pytest.fixture
def sequences(executor: Executor) -> Iterator[list[int]]:
    """A number in the cache for each text."""
    opened = [executor.cache.open_new() for _ in TEXTS]
    yield opened
    executor.cache.check()
    for sequence in opened:
        executor.cache.close(sequence)


def test_every_split_gives_the_bits_of_one_pass(
    executor: Executor, expected: list[torch.Tensor], sequences: list[int]
) -> None:
    """At one point or two; empty ranges change nothing."""
    batch = Batch.joined([Batch.of_sequence(s, 0, text) for s, text in zip(sequences, TEXTS, strict=True)])
    for first, second in combinations_with_replacement(range(N_LAYERS + 1), 2):
        hidden = executor.run(batch, None, range(first))
        for layers in (range(first, second), range(second, N_LAYERS)):
            before = hidden.clone()
            after = executor.run(batch, hidden, layers)
            assert torch.equal(hidden, before)  # what waits isn't changed
            hidden = after
        assert torch.equal(hidden, torch.cat(expected))
        for sequence, text in zip(sequences, TEXTS, strict=True):
            assert executor.cache.length(sequence) == len(text)
            executor.cache.truncate(sequence, 0)
    assert torch.equal(executor.to_logits(hidden[-1:]), executor.lm_head(executor.final_norm(expected[-1][-1:])))


@pytest.mark.few(17)
@pytest.mark.parametrize(("exit_layer", "together"), [(0, 99), (1, 3), (1, 1), (2, 99)])
def test_rows_that_waited_pass_together(
    executor: Executor, expected: list[torch.Tensor], sequences: list[int], exit_layer: int, together: int
) -> None:
    """The lower layers see one row at a time, the upper ones as many as wait, then `together` in a pass."""
    waiting = []
    for sequence, text in zip(sequences, TEXTS, strict=True):
        rows = [Batch.of_sequence(sequence, position, [token]) for position, token in enumerate(text)]
        waiting += [(row, executor.run(row, None, range(exit_layer))) for row in rows]
    outputs = []
    for start in range(0, len(waiting), together):
        rows, hidden = zip(*waiting[start : start + together], strict=True)
        outputs.append(executor.run(Batch.joined(list(rows)), torch.cat(hidden), range(exit_layer, N_LAYERS)))
    assert torch.equal(torch.cat(outputs), torch.cat(expected))


@pytest.mark.few(13)
@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_gives_the_bits_of_one_pass(
    executor: Executor, expected: list[torch.Tensor], sequences: list[int], seed: int
) -> None:
    """Rows advance layer by layer as chance has it; others come between, get as far, and are forgotten again."""
    rng, cache = np.random.default_rng(seed), executor.cache
    states = [[None] * len(text) for text in TEXTS]  # of each row: what came out of the last layer that it passed

    def passed(text: int, layer: int) -> int:
        return len(TEXTS[text]) if layer < 0 else cache.length_at(sequences[text], layer)

    def go_on(layer: int) -> None:
        parts, places = [], []
        for text, sequence in enumerate(sequences):
            first = passed(text, layer)
            n_rows = min(int(rng.integers(0, 5)), passed(text, layer - 1) - first)
            if n_rows > 0:
                parts.append(Batch.of_sequence(sequence, first, TEXTS[text][first : first + n_rows]))
                places += [(text, first + row) for row in range(n_rows)]
        if parts:
            before = None if layer == 0 else torch.stack([states[text][position] for text, position in places])
            after = executor.run(Batch.joined(parts), before, range(layer, layer + 1))
            for (text, position), state in zip(places, after, strict=True):
                states[text][position] = state

    def go_astray(text: int) -> None:
        """Draft tokens through the first layers; they don't hold."""
        length = cache.length(sequences[text])
        if all(passed(text, layer) == length for layer in range(N_LAYERS)):
            wrong = Batch.of_sequence(sequences[text], length, rng.integers(0, 131, 4).tolist())
            end = int(rng.integers(1, N_LAYERS + 1))
            executor.run(wrong, None, range(end))
            assert cache.length_at(sequences[text], end - 1) == length + 4
            cache.truncate(sequences[text], length)

    while any(passed(text, N_LAYERS - 1) < len(TEXTS[text]) for text in range(len(TEXTS))):
        go_on(int(rng.integers(N_LAYERS)))
        go_astray(int(rng.integers(len(TEXTS))))
        cache.check()
    for text, states_of in enumerate(states):
        assert torch.equal(torch.stack(states_of), expected[text])


def test_rows_that_wait_are_cut_with_the_rest(
    executor: Executor, expected: list[torch.Tensor], sequences: list[int]
) -> None:
    """The lower layers are ahead; cutting to what all of them hold, or below, leaves nothing of what waited."""
    sequence, text = sequences[0], TEXTS[0]
    for kept in (5, 3, 0):
        executor.run(Batch.of_sequence(sequence, 0, text[:5]), None, range(N_LAYERS))
        executor.run(Batch.of_sequence(sequence, 5, [77] * 6), None, range(2))
        assert (executor.cache.length(sequence), executor.cache.length_at(sequence, 0)) == (5, 11)
        with pytest.raises(ValueError, match="in one layer"):
            executor.hidden(Batch.of_sequence(sequence, 5, text[5:]))
        executor.cache.truncate(sequence, kept)
        hidden = executor.hidden(Batch.of_sequence(sequence, kept, text[kept:]))
        assert torch.equal(hidden, expected[0][kept:])
        assert len(list(contents(executor, sequence))) == 2 * N_LAYERS
        executor.cache.truncate(sequence, 0)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_prompts_chunk_that_was_not_observed_is_taken_back(fails_at: int) -> None:
    """What drafts know then ends where the cache does, and the prompt can go on from there."""
    profile = round_profile()
    assert profile.gpu is not None
    roomy = replace(
        profile,
        cpu=tuple(replace(times, free_bytes=2**33) for times in profile.cpu),
        gpu=replace(profile.gpu, free_bytes=2**33),
        machine=replace(profile.machine, ram_bytes=2**33, vram_bytes=2**33),
    )
    pins = (("layers.0.*", "gpu"), ("layers.*", "cpu"), ("head", "cpu"))
    plan = make_plan(SPEC, roomy, Limits(context_tokens=64, mode="full", overrides=pins))
    executor = dummy(SPEC, plan, roomy, Timeline())
    sequence = executor.cache.open_new()
    chunks = [Batch.of_sequence(sequence, first, [0] * 4) for first in (0, 4, 8)]
    observed: list[int] = []

    def observe(batch: Batch, normed: torch.Tensor) -> None:
        if len(observed) == fails_at:
            raise KeyboardInterrupt
        observed.append(batch.positions[-1])

    with pytest.raises(KeyboardInterrupt):
        executor.prompt(chunks, observe)
    assert executor.cache.length(sequence) == 4 * fails_at
