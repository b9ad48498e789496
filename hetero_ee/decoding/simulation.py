"""Simulates the time that a prompt and its text need on an emulated machine, next to the planner's prediction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.request import check_emulates
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.prediction import predicted_run_s, predicted_text_s
from hetero_ee.runtime.devices.emulated import emulated_machine
from hetero_ee.runtime.devices.timeline import LANES, Span, Timeline
from hetero_ee.runtime.execution import open_plan
from hetero_ee.runtime.executors.dummy import DummyExecutor, dummy_weights
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee_profiles.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class LaneTime:
    """Seconds that a device or link (one of timeline.LANES) was busy for the prompt and for the generated tokens."""

    lane: str
    prompt_s: float
    generation_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """Emulated and predicted seconds. None of them was measured on the named machine.

    text: None if only times were requested. predicted_generation_s: None if the acceptance of drafts is unknown.
    """

    hardware: str
    hardware_kind: str
    plan_hash: str
    text: str | None
    n_prompt_tokens: int
    n_generated_tokens: int
    prompt_s: float
    generation_s: float
    predicted_prompt_s: float
    predicted_generation_s: float | None
    lanes: tuple[LaneTime, ...]

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.n_prompt_tokens / self.prompt_s if self.prompt_s else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        return (self.n_generated_tokens - 1) / self.generation_s if self.generation_s else 0.0


def of_shapes(
    spec: ModelSpec, plan: Plan, profile: HardwareProfile, n_prompt_tokens: int, n_new_tokens: int
) -> tuple[Simulation, list[Span]]:
    """Simulate a prompt and a text of these lengths, without real tokens. Return the times and the spans of all work.

    Raises: UsageError: if the lengths exceed the plan's context, or the plan exceeds the machine.
    """
    if n_prompt_tokens + n_new_tokens > plan.context_tokens:
        raise UsageError(
            f"a prompt of {n_prompt_tokens} tokens and {n_new_tokens} new ones are more than the context's "
            f"{plan.context_tokens}; shorten them or raise ",
            MODEL_OPTIONS["context_tokens"],
            ".",
        )
    check_emulates(plan, profile)
    timeline = Timeline()
    machine = emulated_machine(profile, spec, plan, timeline)
    executor = open_plan(
        spec, dummy_weights(spec), plan, machine, lambda layers: DummyExecutor(spec, plan.context_tokens, layers)
    )
    prompt_s = _run(executor, n_prompt_tokens, n_new_tokens, lambda: timeline.now_s)
    seconds = prompt_s, timeline.now_s - prompt_s
    counts = n_prompt_tokens, n_new_tokens
    return simulated(spec, plan, profile, Statistics(), timeline.spans, counts, seconds), timeline.spans


def _run(executor: Executor, n_prompt_tokens: int, n_new_tokens: int, clock: Callable[[], float]) -> float:
    """Run a prompt and its text, and return the seconds until the first token. Closes the executor."""
    try:
        sequence, chunk = executor.cache.open_new(), executor.prompt_chunk_tokens
        executor.prompt(
            Batch.of_sequence(sequence, first, [0] * min(chunk, n_prompt_tokens - first), is_prompt=True)
            for first in range(0, n_prompt_tokens, chunk)
        )
        prompt_s = clock()
        for position in range(n_prompt_tokens, n_prompt_tokens + n_new_tokens - 1):
            executor.logits(Batch((0,), (sequence,), (position,)), (0,))
    finally:
        executor.close()
    return prompt_s


def simulated(
    spec: ModelSpec,
    plan: Plan,
    profile: HardwareProfile,
    statistics: Statistics,
    spans: Sequence[Span],
    counts: tuple[int, int],
    seconds: tuple[float, float],
    text: str | None = None,
) -> Simulation:
    """Return the simulation of an emulated engine's first request.

    Args:
        statistics: Statistics that the plan was made with.
        spans: All work of the emulated machine.
        counts: Number of tokens of the prompt and of the text.
        seconds: Seconds of the prompt including its first token, and of the other tokens.
    """
    reading = statistics.of_plan(plan).reading(plan.drafts)
    return Simulation(
        profile.name,
        profile.kind,
        plan.sha256,
        text,
        *counts,
        *seconds,
        predicted_prompt_s=predicted_run_s(spec, profile, plan, counts[0], 0, 0, reading),
        predicted_generation_s=predicted_text_s(spec, profile, plan, statistics, counts[1] - 1, counts[0]),
        lanes=lane_times(spans, 0.0, *seconds),
    )


def lane_times(spans: Sequence[Span], start_s: float, prompt_s: float, generation_s: float) -> tuple[LaneTime, ...]:
    """Return the busy seconds of each device and link from start_s on, for the prompt and for the text."""
    middle_s = start_s + prompt_s
    end_s = middle_s + generation_s
    return tuple(
        LaneTime(lane, _busy_s(lane, spans, start_s, middle_s), _busy_s(lane, spans, middle_s, end_s)) for lane in LANES
    )


def _busy_s(lane: str, spans: Sequence[Span], start_s: float, end_s: float) -> float:
    return sum(
        min(span.end_s, end_s) - max(span.start_s, start_s)
        for span in spans
        if span.lane == lane and span.start_s < end_s and span.end_s > start_s
    )
