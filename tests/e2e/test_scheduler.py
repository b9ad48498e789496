"""The engine's thread: who runs, who waits, what is kept of those before, and how texts end that nobody wants."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, GeneratedToken, HeteroError
from hetero_ee.errors import DeviceMemoryError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.scheduler import Begun, BusyError, Event, Job, Scheduler, Scored, Scoring
from tests.server_support import eventually, opened, slowed


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with opened(tiny) as found:
        found.executor.prompt_chunk_tokens = 32
        yield found


@pytest.fixture
def slowly(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return slowed(engine, monkeypatch)


class Told:
    """A job, and what it was told."""

    def __init__(self, prompt_ids: list[int], n_tokens: int = 400) -> None:
        self.events: list[Event] = []
        self.job = Job(prompt_ids, SamplingParams(max_new_tokens=n_tokens, ignore_eos=True), self.events.append)

    @property
    def n_tokens(self) -> int:
        return sum(isinstance(each, GeneratedToken) for each in self.events)

    def is_over(self) -> bool:
        last = self.events[-1] if self.events else None
        return isinstance(last, HeteroError) or (isinstance(last, GeneratedToken) and last.finish_reason is not None)


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    found = Scheduler(engine, n_slots=2, queue_size=4)
    yield found
    found.close()
    assert engine.executor.cache.sequences == ()  # nothing is left in the cache


def test_a_cancelled_text_gets_one_more_token_at_most(scheduler: Scheduler, slowly: list[Any]) -> None:
    told = Told([5, 6, 7])
    scheduler.submit(told.job)
    eventually(lambda: told.n_tokens > 2)
    scheduler.cancel(told.job)
    n_tokens = told.n_tokens
    eventually(lambda: scheduler.n_running == 0)
    assert told.n_tokens <= n_tokens + 1


def test_a_prompt_is_left_between_its_chunks(scheduler: Scheduler, slowly: list[Any]) -> None:
    told = Told([5] * 500)
    scheduler.submit(told.job)
    eventually(lambda: len(slowly) > 1)
    scheduler.cancel(told.job)
    eventually(lambda: scheduler.n_running == 0)
    assert len(slowly) < 10 and told.n_tokens == 0  # of sixteen chunks


def test_a_long_prompt_holds_others_up_for_a_chunk_alone(scheduler: Scheduler, slowly: list[Any]) -> None:
    talking, reading = Told([5, 6, 7]), Told([5] * 500, 1)
    scheduler.submit(talking.job)
    eventually(lambda: talking.n_tokens > 0)
    scheduler.submit(reading.job)
    eventually(reading.is_over)
    sizes = [len(batch) for batch in slowly]
    between = sizes[sizes.index(32) : len(sizes) - sizes[::-1].index(32)]
    assert between.count(32) == 15 and between.count(1) >= 14  # a token after each chunk


def test_a_short_prompt_waits_for_a_chunk_of_a_long_one_alone(scheduler: Scheduler, slowly: list[Any]) -> None:
    reading, short = Told([5] * 500, 1), Told([6] * 9, 1)
    scheduler.submit(reading.job)
    eventually(lambda: len(slowly) > 1)
    n_passes = len(slowly)
    scheduler.submit(short.job)
    eventually(short.is_over)
    sizes = [len(batch) for batch in slowly]
    assert 9 in sizes[n_passes : n_passes + 3] and not reading.is_over()
    eventually(reading.is_over)
    assert reading.n_tokens == 1


def test_a_short_prompt_passes_long_ones_that_have_all_slots(scheduler: Scheduler, slowly: list[Any]) -> None:
    long = [Told([5 + number] * 500, 1) for number in range(3)]
    short = [Told([9 + number] * 9, 1) for number in range(2)]
    for each in long:
        scheduler.submit(each.job)
    eventually(lambda: len(slowly) > 1)
    for each in short:
        scheduler.submit(each.job)
    eventually(lambda: all(each.is_over() for each in short))
    assert not any(each.is_over() for each in long) and scheduler.n_waiting == 1
    eventually(lambda: all(each.is_over() for each in long))
    assert [each.n_tokens for each in long] == [1, 1, 1]


@pytest.mark.parametrize("place", ["prompt", "open"])
def test_the_memory_of_those_before_is_given_to_who_lacks_it(
    scheduler: Scheduler, engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Of two prompts, the first one's state is kept until the second finds no memory beside it."""
    first, second = Told([5, 6, 7], 3), Told([9, 8], 3)
    scheduler.submit(first.job)
    eventually(first.is_over)
    cache = engine.executor.cache
    owner, most = (engine.executor, 1) if place == "prompt" else (cache, 0)
    real = getattr(owner, place)

    def scarce(*arguments: Any) -> Any:
        if len(cache.sequences) > most:
            raise DeviceMemoryError("there is no memory for two.")
        return real(*arguments)

    monkeypatch.setattr(owner, place, scarce)
    assert len(cache.sequences) == 1
    scheduler.submit(second.job)
    eventually(second.is_over)
    assert second.n_tokens == 3 and isinstance(second.events[-1], GeneratedToken)


def test_what_idle_sequences_hold_makes_room_for_who_comes(scheduler: Scheduler, engine: Engine) -> None:
    """Of a context of 600 tokens: 200 and 200 stay beside each other, and go, the oldest first, for 300 more."""
    cache = engine.executor.cache
    for prompt, lengths in (([1] * 200, [200]), ([2] * 200, [200, 200]), ([3] * 350, [200, 350]), ([4] * 500, [500])):
        told = Told(prompt, 1)
        scheduler.submit(told.job)
        eventually(told.is_over)
        eventually(lambda: scheduler.n_running == 0)
        assert sorted(cache.length(each) for each in cache.sequences) == lengths


def test_the_longest_beginning_is_gone_on_from(scheduler: Scheduler) -> None:
    for prompt, n_cached in (([1] * 9, 0), ([2] * 9, 0), ([1] * 9 + [3], 9), ([2] * 9 + [4, 4], 9), ([7] * 5, 0)):
        told = Told(prompt, 1)
        scheduler.submit(told.job)
        eventually(told.is_over)
        assert isinstance(told.events[0], Begun) and told.events[0].n_cached_tokens == n_cached


@pytest.mark.parametrize("skips", [False, True])
def test_of_replies_that_skipped_neurons_nothing_is_kept(scheduler: Scheduler, engine: Engine, skips: bool) -> None:
    """Their keys and values are not those that a prompt, which skips none, would have there."""
    counts = engine.executor.neurons
    counts.n_neurons = 1 if skips else 0
    try:
        told = Told([6] * 9, 5)
        scheduler.submit(told.job)
        eventually(told.is_over)
        reply = [each.token_id for each in told.events if isinstance(each, GeneratedToken)]
        again = Told([*[6] * 9, *reply], 1)
        scheduler.submit(again.job)
        eventually(again.is_over)
        assert isinstance(again.events[0], Begun) and again.events[0].n_cached_tokens == (9 if skips else 13)
    finally:
        counts.n_neurons = 0


@pytest.mark.parametrize("place", ["open_new", "make_room"])
def test_a_defect_where_a_text_begins_is_its_own(
    scheduler: Scheduler, engine: Engine, monkeypatch: pytest.MonkeyPatch, slowly: list[Any], place: str
) -> None:
    """While another waits for its turn, and then runs."""
    owner = engine.executor.cache if place == "open_new" else engine.executor
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, lambda *_: 1 // 0)
        failed = Told([5, 6, 7])
        scheduler.submit(failed.job)
        eventually(failed.is_over)
    assert "the engine failed (ZeroDivisionError)" in str(failed.events[-1])
    for _ in range(3):
        told = Told([5, 6, 7], 2)
        scheduler.submit(told.job)
        eventually(told.is_over)
        assert told.n_tokens == 2


def test_nothing_is_taken_once_it_is_closed(engine: Engine) -> None:
    scheduler = Scheduler(engine, n_slots=1, queue_size=4)
    told = [Told([5, 6, 7]) for _ in range(3)]
    for each in told:
        scheduler.submit(each.job)
    scheduler.close()
    assert all(isinstance(each.events[-1], HeteroError) for each in told)
    with pytest.raises(BusyError, match="shutting down"):
        scheduler.submit(Told([5]).job)
    scheduler.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_where_a_text_ends_leaves_nobody_waiting(
    engine: Engine, slowly: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even those that run or wait beside it, where the server ends."""
    scheduler = Scheduler(engine, n_slots=2, queue_size=4)
    told = [Told([5, 6, number]) for number in range(4)]
    for each in told:
        scheduler.submit(each.job)
    eventually(lambda: told[0].n_tokens > 0 and told[1].n_tokens > 0)

    def failing(*arguments: Any) -> None:
        raise HeteroError("the device is lost.")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler._slots, "give_back", failing)
        scheduler.close()
    assert all(each.is_over() and isinstance(each.events[-1], BusyError) for each in told)
    for sequence in engine.executor.cache.sequences:
        engine.executor.cache.close(sequence)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_prompt_that_is_scored_ends_within_a_pass_of_its_cancelling(
    scheduler: Scheduler, slowly: list[Any], is_cancelled: bool
) -> None:
    events: list[Event] = []
    ids = [5 + i % 200 for i in range(400)]
    job = Job(ids, SamplingParams(max_new_tokens=1), events.append, Scoring(0, is_all=True))
    scheduler.submit(job)
    eventually(lambda: len(slowly) > 1)
    n_passes = len(slowly)
    if is_cancelled:
        scheduler.cancel(job)
    eventually(lambda: scheduler.n_running == 0)
    if is_cancelled:
        assert len(slowly) <= n_passes + 2 and [type(each) for each in events] == [Begun]
    else:
        scored = events[-1]
        assert len(slowly) == 13 and isinstance(scored, Scored) and len(scored.logprobs) == len(ids) - 1


def test_an_error_while_a_prompt_is_scored_ends_it_alone(
    engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    events: list[Event] = []
    with monkeypatch.context() as patched:
        patched.setattr(engine.executor, "lm_head", broken)
        scheduler.submit(Job([5, 6, 7], SamplingParams(max_new_tokens=1), events.append, Scoring(0, is_all=False)))
        eventually(lambda: len(events) > 1)
    assert [type(each) for each in events] == [Begun, HeteroError]
    after = Told([5, 6, 7], n_tokens=3)
    scheduler.submit(after.job)
    eventually(after.is_over)
    assert after.n_tokens == 3
