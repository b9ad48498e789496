"""Texts that join and leave while others run: shared passes, and the tokens that each has alone."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import DecodingLoop, Engine, HeteroError
from hetero_ee.decoding.loop import Decoding, FullMode, Mode, SeparateModes
from hetero_ee.decoding.requests import Continuation, Ending
from hetero_ee.decoding.turns import NEVER, Turns
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exact import ExactMode
from hetero_ee.speculation.statistics import DraftCounts
from tests.emulation import LAPTOP
from tests.scripted_model import KINDS, PROMPT, ScriptedModel, drafted, numbers, successor, wrong_at

TEXTS = ("Once upon a time", "Tom had a dog.", "The sun", "Lily and Ben went to the park. " * 12)


@pytest.fixture(scope="module", params=["cpu", "split"])
def engine(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """On the CPU alone, or split between it and an emulated GPU."""
    split: Any = {"profile": LAPTOP, "emulate": True, "gpu_layers": 1, "mode": "full"}
    with Engine.from_pretrained(
        tiny, quantizer="none", threads=1, **split if request.param == "split" else {}
    ) as found:
        yield found


def params(number: int) -> SamplingParams:
    sampled = SamplingParams(temperature=1.2, top_k=50, seed=number, repeat_penalty=1.1)
    return SamplingParams(max_new_tokens=8 + 5 * number) if number % 2 else sampled.changed(max_new_tokens=20)


def joined(
    engine: Engine, steps: DecodingLoop, text: str, chosen: SamplingParams, stop: threading.Event = NEVER
) -> int:
    sequence = engine.executor.cache.open_new()
    (number,) = steps.join(Continuation(sequence, engine.tokenizer.encode(text)), chosen, stop)
    return number


def loop_of(model: ScriptedModel, mode: Mode) -> DecodingLoop:
    others: Any = (lambda: Ending(frozenset(), 200), numbers, lambda: 0.0, Turns(None))
    return DecodingLoop(Decoding(model, *others), mode, lambda: False)  # type: ignore[arg-type]


def scripted(model: ScriptedModel, how: Drafting | None = None) -> DecodingLoop:
    """In full mode, or in exact mode with this drafting."""
    executor: Any = model
    if how is None:
        return loop_of(model, FullMode(executor, lambda: 0.0))
    return loop_of(model, ExactMode(executor, how, DraftCounts(), lambda: 0.0))


def test_each_text_is_the_one_that_it_is_alone(engine: Engine) -> None:
    """They join at steps 0, 3, 6 and 9, the last with a prompt of several chunks."""
    steps, found = engine.loop(), dict[int, list[int]]()
    engine.executor.prompt_chunk_tokens = 16
    numbers_of: dict[int, int] = {}
    for step in range(60):
        if step % 3 == 0 and len(numbers_of) < len(TEXTS):
            which = len(numbers_of)
            numbers_of[joined(engine, steps, TEXTS[which], params(which))] = which
        for each in steps.step():
            assert not isinstance(each.outcome, HeteroError)
            found.setdefault(numbers_of[each.number], []).append(each.outcome.token_id)
    for which, text in enumerate(TEXTS):
        assert tuple(found[which]) == engine.generate(text, params(which)).token_ids
    assert steps.step() == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mode", "gpu_layers"), [("exact", 0), ("exact", 6), ("full", 6)])
def test_eight_texts_at_once_are_those_that_generate_gives(
    demo: Path, kernels: Path, mode: str, gpu_layers: int
) -> None:
    """Greedy and sampled ones, in exact mode with the demo model's draft head; half of them join later."""
    how: Any = {"profile": LAPTOP, "emulate": True, "mode": mode, "gpu_layers": gpu_layers}
    with Engine.from_pretrained(demo, threads=1, **how) as engine:
        steps, found = engine.loop(), dict[int, list[int]]()
        asked = [(f"{TEXTS[which % 4]} And {which}", params(which)) for which in range(8)]
        numbers_of = {joined(engine, steps, *asked[which]): which for which in range(4)}
        for step in range(60):
            if step == 3:
                numbers_of |= {joined(engine, steps, *asked[which]): which for which in range(4, 8)}
            for each in steps.step():
                assert not isinstance(each.outcome, HeteroError)
                found.setdefault(numbers_of[each.number], []).append(each.outcome.token_id)
        assert (engine.drafting is None) == (mode == "full")
        for which, (text, chosen) in enumerate(asked):
            assert tuple(found[which]) == engine.generate(text, chosen).token_ids


def test_texts_share_passes() -> None:
    model = ScriptedModel(successor, successor)
    steps = scripted(model)
    for first in (1, 5, 9):
        steps.join(Continuation(model.cache.open_new(), [first]), SamplingParams(max_new_tokens=4), NEVER)
    found: dict[int, list[int]] = {}
    for _ in range(6):
        for each in steps.step():
            assert not isinstance(each.outcome, HeteroError)
            found.setdefault(each.number, []).append(each.outcome.token_id)
    assert found == {0: [2, 3, 4, 5], 1: [6, 7, 8, 9], 2: [10, 11, 12, 13]}
    assert [len(each.batch) for each in model.verifications] == [1, 2, 3, 2, 1]


def test_a_text_that_leaves_is_computed_no_more() -> None:
    model = ScriptedModel(successor, successor)
    steps = scripted(model)
    for _ in range(2):
        steps.join(Continuation(model.cache.open_new(), list(PROMPT)), SamplingParams(), NEVER)
    for _ in range(3):
        steps.step()
    steps.leave(0)
    n_passes = len(model.passes)
    assert [each.number for each in steps.step()] == [1]
    assert [len(each.batch) for each in model.passes[n_passes:]] == [1]


def test_a_text_that_fails_ends_alone() -> None:
    """Logits are spoiled at position 6, which the first text alone reaches."""
    model = ScriptedModel(successor, successor, spoiled=frozenset({6}))
    steps = scripted(model)
    steps.join(Continuation(model.cache.open_new(), list(PROMPT)), SamplingParams(max_new_tokens=8), NEVER)
    steps.join(Continuation(model.cache.open_new(), [1]), SamplingParams(max_new_tokens=4), NEVER)
    outcomes = [each for _ in range(12) for each in steps.step()]
    errors = [each for each in outcomes if isinstance(each.outcome, HeteroError)]
    assert [each.number for each in errors] == [0] and "not finite" in str(errors[0].outcome)
    assert [each.number for each in outcomes].count(1) == 4


def test_a_pass_that_fails_is_repeated_with_each_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel(successor, successor)
    run = model.run

    def failing(batch: Any, hidden: Any, layers: range) -> Any:
        if len(batch) > 1 and len(set(batch.sequences)) > 1:
            raise HeteroError("too much at a time.")
        return run(batch, hidden, layers)

    monkeypatch.setattr(model, "run", failing)
    steps = scripted(model)
    for _ in range(2):
        steps.join(Continuation(model.cache.open_new(), list(PROMPT)), SamplingParams(max_new_tokens=3), NEVER)
    said = [each.outcome.token_id for _ in range(6) for each in steps.step()]  # type: ignore[union-attr]
    assert sorted(said) == [6, 6, 7, 7, 8, 8]


def test_a_prompt_is_stopped_between_chunks(engine: Engine) -> None:
    engine.executor.prompt_chunk_tokens = 16
    steps, stop = engine.loop(), threading.Event()
    number = joined(engine, steps, TEXTS[3], params(1), stop)
    stop.set()
    (ended,) = steps.step()
    assert ended.number == number and isinstance(ended.outcome, HeteroError) and ended.is_last
    assert steps.step() == []


@pytest.mark.parametrize("n_async", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_exact_mode_share_passes(kind: str, n_async: int) -> None:
    """Each as it is in full mode, with drafts that are wrong at times; one joins late, one leaves early."""
    how: Any = {} if kind == "sequences" else {"async_layers": n_async}
    model, drafting = drafted(kind, wrong_at(7, 12), **how)
    steps, found = scripted(model, drafting), dict[int, list[int]]()

    def join(first: int, n_tokens: int) -> int:
        chosen = SamplingParams(max_new_tokens=n_tokens)
        return steps.join(Continuation(model.cache.open_new(), [first]), chosen, NEVER)[0]

    join(1, 12), join(5, 40)
    for step in range(40):
        if step == 4:
            join(9, 12)
        for each in steps.step():
            assert not isinstance(each.outcome, HeteroError)
            found.setdefault(each.number, []).append(each.outcome.token_id)
        if step == 5:
            steps.leave(1)
            model.cache.close(1)
    n_left = len(found[1])
    assert found == {0: [*range(2, 14)], 1: [*range(6, 6 + n_left)], 2: [*range(10, 22)]} and n_left < 40
    together = [each.batch for each in model.verifications if len(set(each.batch.sequences)) > 1]
    assert together and max(map(len, together)) > 2  # drafts of several texts in one pass
    assert steps.step() == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_text_that_fails_ends_alone(kind: str) -> None:
    """Logits are spoiled at position 6, which the first text alone reaches: its tokens before are given out."""
    model, how = drafted(kind)
    model.spoiled = frozenset({6})
    steps = scripted(model, how)
    steps.join(Continuation(model.cache.open_new(), list(PROMPT)), SamplingParams(max_new_tokens=8), NEVER)
    steps.join(Continuation(model.cache.open_new(), [1]), SamplingParams(max_new_tokens=4), NEVER)
    outcomes = [each for _ in range(12) for each in steps.step()]
    errors = [each for each in outcomes if isinstance(each.outcome, HeteroError)]
    assert [each.number for each in errors] == [0] and "not finite" in str(errors[0].outcome)
    assert [each.number for each in outcomes].count(1) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_pass_that_fails_is_repeated_with_each_text_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, how = drafted(kind, wrong_at(9))
    run = model.run

    def failing(batch: Any, hidden: Any, layers: range) -> Any:
        if len(set(batch.sequences)) > 1:
            raise HeteroError("too much at a time.")
        return run(batch, hidden, layers)

    monkeypatch.setattr(model, "run", failing)
    steps, found = scripted(model, how), dict[int, list[int]]()
    for first in (1, 5):
        steps.join(Continuation(model.cache.open_new(), [first]), SamplingParams(max_new_tokens=9), NEVER)
    for _ in range(12):
        for each in steps.step():
            found.setdefault(each.number, []).append(each.outcome.token_id)  # type: ignore[union-attr]
    assert found == {0: [*range(2, 11)], 1: [*range(6, 15)]}


def test_sequences_with_modes_of_their_own_share_no_pass() -> None:
    """Each as it is in full mode, a step of each in turn; what one drafted goes when it leaves."""
    model, how = drafted("exits", wrong_at(7, 12))
    executor: Any = model
    loop = loop_of(model, SeparateModes(lambda: ExactMode(executor, how, DraftCounts(), lambda: 0.0)))
    found, order = dict[int, list[int]](), list[int]()
    for first in (1, 5, 9):
        loop.join(Continuation(model.cache.open_new(), [first]), SamplingParams(max_new_tokens=12))
    for step in range(14):
        for each in loop.step():
            assert not isinstance(each.outcome, HeteroError)
            found.setdefault(each.number, []).append(each.outcome.token_id)
            order.append(each.number)
        if step == 4:
            loop.leave(2)
            assert set(model.cache.lengths(2)) == {model.cache.length(2)}
    n_left = len(found[2])
    assert found == {0: [*range(2, 14)], 1: [*range(6, 18)], 2: [*range(10, 10 + n_left)]} and n_left < 12
    assert loop.step() == [] and all(len(set(each.batch.sequences)) == 1 for each in model.passes)


def test_an_error_of_a_sequence_with_its_own_mode_is_its_own() -> None:
    model = ScriptedModel(successor, successor, spoiled=frozenset({4}))
    executor: Any = model
    loop = loop_of(model, SeparateModes(lambda: FullMode(executor, lambda: 0.0)))
    for prompt in ([1], [1, 2, 3, 4, 5, 6]):
        loop.join(Continuation(model.cache.open_new(), prompt), SamplingParams(max_new_tokens=6))
    outcomes = [each for _ in range(8) for each in loop.step()]
    assert [each.number for each in outcomes if isinstance(each.outcome, HeteroError)] == [0]
    assert [each.number for each in outcomes].count(1) == 6


def test_prompts_of_one_call_are_read_before_any_of_them_goes_on() -> None:
    model = ScriptedModel(successor, successor)
    executor: Any = model
    loop = DecodingLoop(
        Decoding(executor, lambda: Ending(frozenset(), 200), numbers, lambda: 0.0, Turns(None)),
        FullMode(executor, lambda: 0.0),
    )
    assert loop.join([[1, 2], [5]], SamplingParams(max_new_tokens=3)) == [0, 1]
    assert [[each.number for each in loop.step()] for _ in range(4)] == [[0, 1], [0, 1], [0, 1], []]
    assert model.cache.sequences == () and [len(each.batch) for each in model.verifications] == [2, 2]


def reads(model: ScriptedModel) -> list[tuple[int, int]]:
    """Sequence and tokens of each chunk of a prompt."""
    return [(each.batch.sequences[0], len(each.batch)) for each in model.passes if each.is_prompt]


def test_the_shortest_prompt_is_read_first_and_a_long_one_still_goes_on() -> None:
    """Of 40, 24 and 4 tokens in chunks of 8; then short ones come again and again."""
    model = ScriptedModel(successor, successor, prompt_chunk_tokens=8)
    steps = scripted(model)

    def join(n_tokens: int) -> None:
        steps.join(Continuation(model.cache.open_new(), [1] * n_tokens), SamplingParams(max_new_tokens=1), NEVER)

    for n_tokens in (40, 24, 4):
        join(n_tokens)
    for _ in range(3):
        steps.step()
    assert reads(model) == [(2, 4), (1, 8), (1, 8)]
    for _ in range(40):
        join(8)
        steps.step()
    assert [reads(model)[3:].count((sequence, 8)) for sequence in (0, 1)] == [2, 1]
    for _ in range(50):
        steps.step()
    assert sum(n_tokens for sequence, n_tokens in reads(model) if sequence == 0) == 40


def test_a_prompt_that_is_read_alone_makes_way_for_one_that_waits() -> None:
    model, waits = ScriptedModel(successor, successor, prompt_chunk_tokens=8), list[bool]()
    executor: Any = model
    others: Any = (lambda: Ending(frozenset(), 200), numbers, lambda: 0.0, Turns(None))
    loop = DecodingLoop(Decoding(executor, *others), FullMode(executor, lambda: 0.0), lambda: bool(waits))
    loop.join(Continuation(model.cache.open_new(), [1] * 40), SamplingParams(max_new_tokens=1), NEVER)
    waits.append(True)
    assert loop.step() == [] and reads(model) == [(0, 8)]
    waits.clear()
    (first,) = loop.step()
    assert first.is_last and reads(model) == [(0, 8)] * 5
