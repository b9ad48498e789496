"""A context that nobody asked for grows when a text needs it, and the text is that of a large one from the start."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.decoding.result import FinishReason
from hetero_ee.errors import DeviceMemoryError
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import EXIT
from hetero_ee.runtime.executors.replanning import ReplanningExecutor
from hetero_ee_cli.reports.run_report import expected_rate
from hetero_ee_profiles.reference import reference_profile
from tests.chat_support import LINES
from tests.emulation import LAPTOP

FIRST, ROUND = 64, 16  # tokens
OPENINGS = ["Once upon a time", "The big dog", "Tom and his mom went to the store."]
STORY = "Lily had a red ball. She threw it high and it fell into the pond. " * 9
N_TOKENS, LENGTHS = 150, (20, 90, 90)
WAYS: dict[str, dict[str, Any]] = {
    "planned CPU": {"gpu_layers": 0, "mode": "full"},
    "traced CPU": {"gpu_layers": 0, "mode": "full", "traces": True},
    "emulated split": {"gpu_layers": 6, "mode": "full", "emulate": True},
    "head on the CPU": {"gpu_layers": 0, "mode": "exact"},
    "head on a split": {"gpu_layers": 6, "mode": "exact", "emulate": True},
    "exits on the CPU": {"gpu_layers": 0, "mode": "exact", "head": False},
    "exits on a split": {"gpu_layers": 6, "mode": "exact", "head": False, "emulate": True},
}


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans choose FIRST tokens, whatever more would cost."""
    monkeypatch.setattr("hetero_ee.planning.context.USUAL_TOKENS", FIRST)
    monkeypatch.setattr("hetero_ee.planning.context.FREE", 2.0)
    monkeypatch.setattr("hetero_ee.planning.context.ROUND_TOKENS", ROUND)


@pytest.fixture(scope="module")
def whole() -> Iterator[Engine]:
    """With all of the model's context, on the CPU."""
    with Engine.from_pretrained(threads=1) as engine:
        yield engine


class Told:
    """The remarks among progress calls."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def __call__(self, stage: str, done: int, in_all: int) -> None:
        if not in_all:
            self.remarks.append(stage)


def opened(told: Told, context_tokens: int = 0, emulate: bool = False, traces: bool = False, **limits: Any) -> Engine:
    found = Engine.from_pretrained(
        threads=1,
        profile=reference_profile(LAPTOP),
        limits=Limits(**limits),
        context_tokens=context_tokens,
        emulate=emulate,
        traces=traces,
        progress=told,
    )
    told.remarks.clear()
    return found


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    options = dict(WAYS[request.param])
    if not options.pop("head", True):
        monkeypatch.setattr("hetero_ee.speculation.opening.DRAFT_HEAD_FOLDER", "missing")
    return options


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_text_that_runs_on(whole: Engine, way: dict[str, Any], sampling: dict[str, Any]) -> None:
    expected = whole.generate(OPENINGS[0], max_new_tokens=N_TOKENS, ignore_eos=True, **sampling)
    told = Told()
    with opened(told, **way) as engine:
        assert engine.context_tokens == FIRST and engine.plan is not None
        if way["mode"] == "exact":
            assert engine.drafting is not None and (engine.plan.drafts == EXIT) == (not engine.drafting.sources)
        found = engine.generate(OPENINGS[0], max_new_tokens=N_TOKENS, ignore_eos=True, **sampling)
        assert found.token_ids == expected.token_ids and found.finish_reason is FinishReason.LENGTH
        assert engine.plan.context_tokens == engine.context_tokens == 4 * FIRST
        assert engine.plan.mode == way["mode"]
    assert len(told.remarks) == 2
    assert told.remarks[0].startswith(f"The context grew from {FIRST} to {2 * FIRST} tokens: a text needs them, and ")


@pytest.mark.sample(2)
def test_a_long_prompt(whole: Engine, way: dict[str, Any]) -> None:
    assert whole.count_tokens(STORY) > 2 * FIRST
    expected = whole.generate(STORY, max_new_tokens=8).token_ids
    told = Told()
    with opened(told, **way) as engine:
        assert [token.token_id for token in engine.stream(STORY, max_new_tokens=8)] == list(expected)
        assert engine.context_tokens >= whole.count_tokens(STORY) + 8
    assert len(told.remarks) == 1


@pytest.mark.sample(1)
def test_several_texts_at_once(whole: Engine, way: dict[str, Any]) -> None:
    prompts = [*OPENINGS, STORY[:200]]
    expected = whole.generate(prompts, max_new_tokens=90, ignore_eos=True)
    with opened(told := Told(), **way) as engine:
        found = engine.generate(prompts, max_new_tokens=90, ignore_eos=True)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        engine.executor.cache.check()
        if engine.plan is not None and engine.plan.n_bytes("gpu"):  # a GPU's cache has one pool for all of them
            assert engine.context_tokens >= sum(each.n_prompt_tokens + 90 for each in found) - len(found)
    assert told.remarks and all(line.startswith("The context grew from ") for line in told.remarks)


def test_texts_that_take_turns(whole: Engine) -> None:
    """The context grows for one while another is under way."""
    with opened(Told(), gpu_layers=6, mode="exact", emulate=True) as engine:
        streams = [
            engine.stream(text, max_new_tokens=n, ignore_eos=True) for text, n in zip(OPENINGS, LENGTHS, strict=True)
        ]
        found: list[list[int]] = [[] for _ in streams]
        for _ in range(90):
            for tokens, stream in zip(found, streams, strict=True):
                tokens.extend(token.token_id for token in [next(stream, None)] if token is not None)
        for text, tokens in zip(OPENINGS, found, strict=True):
            expected = whole.generate(text, max_new_tokens=len(tokens), ignore_eos=True)
            assert tokens == list(expected.token_ids)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["planned CPU", "emulated split", "head on a split"])
def test_a_conversation_grows_before_it_forgets(whole: Engine, name: str) -> None:
    with (
        whole.chat(chat_template=LINES, max_new_tokens=12) as expected,
        opened(told := Told(), **WAYS[name]) as engine,
        engine.chat(chat_template=LINES, max_new_tokens=12) as chat,
    ):
        for number in range(8):
            reply = chat.send(f"{number} {OPENINGS[number % 3]}")
            assert reply.n_forgotten_messages == 0
            asked = expected.send(f"{number} {OPENINGS[number % 3]}")
            assert reply.finish().token_ids == asked.finish().token_ids
        assert chat.context_tokens == engine.context_tokens >= 2 * FIRST
        assert chat.n_cached_tokens > FIRST
    assert len(told.remarks) >= 1


def test_no_speed_is_expected_of_a_text_that_was_read_again(whole: Engine) -> None:
    with opened(Told(), gpu_layers=6, mode="full", emulate=True) as engine:
        result = engine.generate(OPENINGS[0], max_new_tokens=90, ignore_eos=True)
        assert expected_rate(engine, result) is None
        assert expected_rate(engine, replace(result, token_ids=result.token_ids[:20])) is not None
        assert (
            expected_rate(engine, replace(result, n_prompt_tokens=FIRST + 1, token_ids=result.token_ids[:20]))
            is not None
        )


def test_the_models_own_context_is_the_end(whole: Engine) -> None:
    own = whole.spec.max_context_tokens
    with opened(Told(), gpu_layers=0, mode="full") as engine:
        found = engine.generate(OPENINGS[0], max_new_tokens=2 * own, ignore_eos=True)
        assert found.finish_reason is FinishReason.CONTEXT and engine.context_tokens == own
        assert found.n_prompt_tokens + found.n_generated_tokens == own
        with pytest.raises(UsageError, match=f"limit is {own}, including one generated token; shorten it, since the"):
            engine.stream(STORY * 8)


@pytest.mark.parametrize("emulate", [False, True])
def test_a_context_that_was_asked_for_stays(emulate: bool) -> None:
    told = Told()
    limits = Limits(gpu_layers=6 if emulate else 0, mode="full")
    with opened(told, FIRST, emulate, gpu_layers=limits.gpu_layers, mode="full") as engine:
        assert engine.generate(OPENINGS[0], ignore_eos=True).finish_reason is FinishReason.CONTEXT
        with pytest.raises(UsageError, match=f"limit is {FIRST}, including one generated token; shorten it or raise"):
            engine.stream(STORY)
        plan = engine.plan
    with Engine.from_pretrained(threads=1, profile=reference_profile(LAPTOP), plan=plan, emulate=emulate) as engine:
        assert engine.generate(OPENINGS[0], ignore_eos=True).finish_reason is FinishReason.CONTEXT
    assert told.remarks == []


@pytest.mark.parametrize("name", ["planned CPU", "emulated split", "head on a split"])
def test_where_no_plan_has_room_the_text_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero_ee.runtime import replans

    real, n_tries = replans.make_plan, []

    def refusing(spec: Any, profile: Any, limits: Limits, *others: Any) -> Any:
        if limits.context_tokens:
            n_tries.append(limits.context_tokens)
            raise UsageError("keys and values need more RAM.")
        return real(spec, profile, limits, *others)

    monkeypatch.setattr(replans, "make_plan", refusing)
    with opened(told := Told(), **WAYS[name]) as engine:
        for _ in range(2):
            found = engine.generate(OPENINGS[0], ignore_eos=True)
            assert found.finish_reason is FinishReason.CONTEXT
            assert found.n_prompt_tokens + found.n_generated_tokens == FIRST == engine.context_tokens
        assert len(n_tries) == 3  # the refusal is remembered
        with pytest.raises(UsageError, match=f"the context holds {FIRST}, and no plan for more fits this machine"):
            next(engine.stream(STORY))
    assert told.remarks == []


def test_memory_that_is_not_there_leaves_the_text_as_it_was(whole: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger plan that can't be opened: the one before goes on, to its end."""
    with opened(told := Told(), gpu_layers=6, mode="full", emulate=True) as engine:
        assert isinstance(engine.executor, ReplanningExecutor)
        real = engine.executor._open

        def failing(plan: Any) -> Any:
            if plan.context_tokens > FIRST:
                raise DeviceMemoryError("the CPU has no memory left.", "cpu")
            return real(plan)

        monkeypatch.setattr(engine.executor, "_open", failing)
        found = engine.generate(OPENINGS[:2], max_new_tokens=N_TOKENS, ignore_eos=True)
        for text, result in zip(OPENINGS, found, strict=False):
            n_tokens = result.n_generated_tokens
            assert result.finish_reason is FinishReason.CONTEXT and n_tokens > 40
            expected = whole.generate(text, max_new_tokens=n_tokens, ignore_eos=True)
            assert result.token_ids == expected.token_ids
        engine.executor.cache.check()
    assert told.remarks == []


def test_ctrl_c_while_the_context_grows(whole: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was being said is lost; the engine and its conversation go on."""
    with (
        opened(Told(), gpu_layers=6, mode="full", emulate=True) as engine,
        engine.chat(chat_template=LINES, max_new_tokens=12) as chat,
    ):
        assert isinstance(engine.executor, ReplanningExecutor)
        first = chat.send(OPENINGS[0]).finish()
        real = engine.executor._open

        def interrupted(plan: Any) -> Any:
            if plan.context_tokens > FIRST:
                monkeypatch.setattr(engine.executor, "_open", real)
                raise KeyboardInterrupt
            return real(plan)

        monkeypatch.setattr(engine.executor, "_open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.send(OPENINGS[1], max_new_tokens=N_TOKENS, ignore_eos=True).finish()
        chat.clear()
        assert chat.send(OPENINGS[0]).finish().token_ids == first.token_ids
        expected = whole.generate(OPENINGS[2], max_new_tokens=90, ignore_eos=True)
        assert engine.generate(OPENINGS[2], max_new_tokens=90, ignore_eos=True).token_ids == expected.token_ids
