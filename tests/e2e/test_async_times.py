"""Asynchronous drafting in virtual time: the GPU has guesses in its layers while the CPU verifies, to the second."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_ee import Engine
from hetero_ee.decoding.requests import Ending, Request
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation import exact
from hetero_ee.speculation.asynchronous import AsyncDrafting
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.device_support import SPEC, round_profile
from tests.drafted_generation import generate_exact
from tests.emulation import dummy, emulated, planned
from tests.exact_cases import Case, Run, check_identity
from tests.placements import split_at

PLENTY = 2**33
NEVER = FixedThreshold(2.0)
SAMPLED = Case(5, "demo", "codebook", True, "exit", 1, 0.5, "always", False, "temperature", 1, "length")


def told(*, async_layers: int, head: str = "cpu") -> tuple[Timeline, list[float]]:
    """Four tokens after seven on the machine of round numbers, layer 0 on its GPU and layer 1 on its CPU: the time
    line, and when each token was there. No token exits; as every logit is 0, every guess is right."""
    profile = round_profile()
    assert profile.gpu is not None
    roomy = replace(
        profile,
        cpu=tuple(replace(times, free_bytes=PLENTY) for times in profile.cpu),
        gpu=replace(profile.gpu, free_bytes=PLENTY),
        machine=replace(profile.machine, ram_bytes=PLENTY, vram_bytes=PLENTY),
    )
    pins = ((r"layers\.0\..*", "gpu"), ("layers.*|embedding", "cpu"), ("head", head))
    limits = Limits(context_tokens=64, mode="full", overrides=pins, kv_type=profile.gpu.kv_type)
    plan = make_plan(SPEC, roomy, limits)
    timeline = Timeline()
    executor = dummy(SPEC, plan, roomy, timeline)
    how = Drafting(1, 2, NEVER, DraftEnd(), async_layers=async_layers)
    params, ending = SamplingParams(4), Ending(frozenset(), 64)
    tokens = generate_exact(executor, [[0] * 7], params, ending, str, lambda: timeline.now_s, how)
    return timeline, [token.elapsed_s for token in tokens]


def spans(timeline: Timeline, first_s: float, end_s: float) -> list[tuple[str, str, float, float]]:
    """Those that begin in between, counted from first_s."""
    found = [span for span in timeline.spans if first_s <= span.start_s < end_s]
    return sorted((span.lane, span.name, span.start_s - first_s, span.end_s - first_s) for span in found)


def test_the_cpu_verifies_while_the_gpu_has_the_guess() -> None:
    """By hand: on the CPU the attention of a token takes 6 + 2 products of 4 s, half of a layer's 1 s, and 1 s and an
    eighth for each position; the FFN 8 + 4 products and half a second; the head 3 of 8 s and 2 s. The GPU takes a
    quarter. So a token crosses in 0.25, is 8.65625 s (the ninth position) and 12.125 s on the GPU; the token before it,
    the eighth, is 34.5 and 48.5 s on the CPU, and its logits 26."""
    timeline, (first_s, second_s, third_s, _) = told(async_layers=1)
    assert spans(timeline, first_s, second_s) == [
        ("cpu", "head", 21.25, 47.25),  # judges the token, which does not exit
        ("cpu", "head", 130.5, 156.5),
        ("cpu", "layers.1.attention", 47.5, 82.0),
        ("cpu", "layers.1.ffn", 82.0, 130.5),
        ("gpu", "layers.0.attention", 0.25, 8.875),
        ("gpu", "layers.0.attention", 47.75, 56.40625),
        ("gpu", "layers.0.ffn", 8.875, 21.0),
        ("gpu", "layers.0.ffn", 56.40625, 68.53125),
        ("rows_to_cpu", "hidden states", 21.0, 21.25),  # to the head
        ("rows_to_cpu", "hidden states", 47.25, 47.5),  # to layer 1
        ("rows_to_gpu", "hidden states", 0.0, 0.25),
        ("rows_to_gpu", "hidden states", 47.5, 47.75),
    ]
    # The next step begins with its token at the exit layer: what is left of it is the CPU's, and two transfers.
    assert third_s - second_s == 0.25 + 26 + 0.25 + 34.625 + 48.5 + 26


@pytest.mark.parametrize("head", ["cpu", "gpu"])
def test_each_right_guess_saves_its_time_on_the_gpu_and_nothing_else_changes(head: str) -> None:
    """Two of three steps begin with a token that is there; after the third the text ends, so that it has no guess."""
    _, plain_s = told(async_layers=0, head=head)
    _, async_s = told(async_layers=1, head=head)
    assert async_s[:2] == plain_s[:2]
    ninth_s, tenth_s = (0.25 + 8 + 0.125 + (1 + position / 8) / 4 + 12.125 for position in (9, 10))
    assert plain_s[2] - async_s[2] == ninth_s
    assert plain_s[3] - async_s[3] == ninth_s + tenth_s


class KeepsWrongOnes(AsyncDrafting):
    """Takes every guess for the right one, whatever the text says there."""

    def keep_if_right(self, text: Request) -> bool:
        guess = self._begun.get(text.index)
        if guess is not None:
            guess.token_id = text.token_ids[-1]
        return super().keep_if_right(text)


@pytest.fixture(scope="module")
def engine(demo: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(demo, quantizer="codebook", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("async_layers", [6, 2])
def test_a_wrong_guess_that_is_kept_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, async_layers: int
) -> None:
    run = Run.of(SAMPLED, engine, 40)
    run = replace(run, params=run.params.changed(max_new_tokens=40))
    plan = planned(engine.spec, overrides=split_at(6), context_tokens=engine.context_tokens)
    executor = emulated(engine.spec, engine.executor.weights, plan)
    how = Drafting(6, 2, FixedThreshold(0.0), DraftEnd(), async_layers=async_layers)
    counts = DraftCounts()
    check_identity(run.full(), run.exact(how, executor, counts))
    assert 2 < counts.n_ahead_kept < counts.n_ahead - 2
    monkeypatch.setattr(exact, "AsyncDrafting", KeepsWrongOnes)
    said = run.exact(how, executor)
    with pytest.raises(AssertionError):
        check_identity(run.full(), said)
    executor.close()
