"""An engine that drafts writes what one that does not writes: exits, a draft head, n-grams; chat; emulated."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, ModelError, UsageError
from hetero_ee.config import READING
from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.layers.state import KV_BYTES
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import EXIT, SEQUENCE, Plan
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP

OPENINGS = ["Once upon a time", "The big dog", "Tom and his mom went to the store."]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
WAYS = ["head", "exits", "n-grams"]


@pytest.fixture(scope="module")
def full() -> Iterator[dict[str, Engine]]:
    """On the CPU alone, by type of keys and values; unplanned where it is the default."""
    with ExitStack() as opened:
        engines = {KV_TYPE: Engine.from_pretrained(threads=1)}
        for kv_type in set(KV_BYTES) - {KV_TYPE}:
            limits = Limits(gpu_layers=0, mode="full", kv_type=kv_type)
            engines[kv_type] = Engine.from_pretrained(threads=1, profile=reference_profile(LAPTOP), limits=limits)
        for engine in engines.values():
            opened.enter_context(engine)
        yield engines


def drafting_plan(way: str, **limits: Any) -> Plan:
    """A plan of the demo model that drafts in this way, whatever would be fastest."""
    with emulating(limits=Limits(mode="exact", **limits)) as engine:
        found = engine.plan
    assert found is not None and found.drafts == SEQUENCE
    return replace(found, drafts=EXIT, exit_layer=6, draft_length=5) if way == "exits" else found


def emulating(**options: Any) -> Engine:
    return Engine.from_pretrained(threads=1, profile=reference_profile(LAPTOP), emulate=True, **options)


DRAFTING = [(way, n, kv_type) for way in WAYS for n in (0, 6) for kv_type in (KV_BYTES if way == "head" else [KV_TYPE])]


@pytest.fixture(scope="module", params=DRAFTING, ids=str)
def drafting(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """On the emulated laptop, the layers on the CPU or half of them on the GPU."""
    way, gpu_layers, kv_type = request.param
    plan = drafting_plan(way, gpu_layers=gpu_layers, kv_type=kv_type)
    with pytest.MonkeyPatch.context() as patched:
        if way == "n-grams":  # as for a model that brings no draft head
            patched.setattr("hetero_ee.speculation.opening.DRAFT_HEAD_FOLDER", "missing")
        engine = emulating(plan=plan)
    with engine:
        yield engine


@pytest.mark.sample(2)
@pytest.mark.few(11)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_those_of_full_mode(full: dict[str, Engine], drafting: Engine, sampling: dict[str, Any]) -> None:
    assert drafting.plan is not None
    engines = full[drafting.plan.kv_type], drafting
    expected, found = (engine.generate(OPENINGS, max_new_tokens=48, **sampling) for engine in engines)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    statistics = drafting.draft_statistics
    assert statistics is not None and statistics.n_tokens == sum(len(result.token_ids) - 1 for result in expected)
    if drafting.plan.drafts == EXIT:
        assert drafting.draft_origin == "exit after layer 6"
        assert all(statistics.known_after[depth] for depth in (6, 12))


@pytest.mark.few(4)
def test_replies_are_those_of_full_mode(full: dict[str, Engine], drafting: Engine) -> None:
    assert drafting.plan is not None
    with full[drafting.plan.kv_type].chat() as expected, drafting.chat() as found:
        for message in ("Tell me a story.", "Go on."):
            told = [
                "".join(token.text for token in chat.send(message, max_new_tokens=24)) for chat in (expected, found)
            ]
            assert told[0] == told[1]


def test_the_planner_drafts_where_that_is_faster() -> None:
    with emulating() as fast, emulating(limits=Limits(mode="full")) as slow:
        rates = [engine.generate(OPENINGS[0], max_new_tokens=64).generated_tokens_per_s for engine in (fast, slow)]
        assert fast.plan is not None and fast.plan.mode == "exact" and rates[0] > 1.2 * rates[1]


def test_a_draft_head_that_is_asked_for_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        emulating(draft_head=tmp_path)


def test_exits_need_a_calibration(stories260k: Path) -> None:
    with pytest.raises(UsageError, match="whose drafts were measured"):
        emulating(model=stories260k, limits=Limits(mode="exact"))


def test_a_long_prompts_progress_is_told_as_it_is_read_and_the_draft_head_reads_along() -> None:
    """By the executor that plans again, too: each chunk is told when the one before is under way."""
    prompt, told = " ".join(OPENINGS * 70), list[tuple[str, int, int, float]]()
    with emulating(limits=Limits(mode="exact", gpu_layers=6), context_tokens=1600) as engine:
        n_tokens = engine.count_tokens(prompt)
        engine.executor.progress = lambda *what: told.append((*what, engine._clock()))
        found = engine.generate(prompt, max_new_tokens=8)
        times = [time_s for stage, _, _, time_s in told if stage == READING]
        assert [n_done for _, n_done, *_ in told] == [*range(0, n_tokens, 512), n_tokens] and n_tokens > 2 * 512
        assert times == sorted(times) and 0 < times[-1] <= found.prompt_s  # the host waits for no chunk but the CPU's
        statistics, spans = engine.draft_statistics, [span for span in engine.spans if span.name == "draft_head.ffn"]
        assert statistics is not None and 0 <= statistics.prompt_s["draft head"] < 0.3 * found.prompt_s
        assert sum(span.start_s < found.prompt_s for span in spans) >= 3  # the last position waits for the first token
