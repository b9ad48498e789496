"""Where draft sequences are computed: by the device that makes a request fastest, in its memory budget."""

from dataclasses import replace
from typing import Any

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.options.engine import MTP_HEAD
from hetero_ee.planning.candidates import best_candidate
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.schedule import WORTH_IT
from hetero_ee.planning.statistics import DraftRates, PromptReading, Statistics
from hetero_ee.planning.times.prediction import predicted_step
from hetero_ee.speculation.opening import DraftKnowledge
from hetero_ee_profiles.records import from_json, to_json
from hetero_ee_profiles.reference import reference_profile

SPEC, PROFILE = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
CONTEXT, HEAD_BYTES, CPU_S, GPU_S, GIB = 512, 2**28, 5e-3, 1e-3, 2**30
ACCEPTANCE = (0.8, 0.8)


def rates(on_gpu: bool, draft_s: float, n_bytes: int = HEAD_BYTES, by_gpu: DraftRates | None = None) -> DraftRates:
    reading = PromptReading(lambda m, context_tokens: m * draft_s / 20, on_gpu)
    memory = lambda context_tokens, n_sequences: n_bytes + context_tokens  # noqa: E731
    return DraftRates("a head", ACCEPTANCE, draft_s, reading, memory, by_gpu=by_gpu)


def both(gpu_s: float = GPU_S, gpu_bytes: int = HEAD_BYTES, cpu_bytes: int = HEAD_BYTES) -> Statistics:
    return Statistics(drafts=rates(False, CPU_S, cpu_bytes, rates(True, gpu_s, gpu_bytes)))


def planned(known: Statistics, **limits: Any) -> Plan:
    return plan(SPEC, PROFILE, Limits(**{"context_tokens": CONTEXT, "vram_budget_bytes": 3 * GIB} | limits), known)


def draft_terms(made: Plan) -> list[tuple[str, int]]:
    return [(term.device, term.n_bytes) for term in made.memory if term.name == "draft head"]


def test_the_gpu_drafts_where_it_is_faster_and_its_memory_is_the_plans() -> None:
    found, known = planned(both()), both()
    assert found.mode == "exact" and draft_terms(found) == [("gpu", HEAD_BYTES + CONTEXT)]
    assert found.n_bytes("gpu") <= found.vram_budget_bytes
    free = planned(Statistics(drafts=rates(True, GPU_S, 0)))  # layers are in its place
    assert found.prediction.generated_tokens_per_s < free.prediction.generated_tokens_per_s
    step = predicted_step(SPEC, PROFILE, found, known, found.prediction.context_tokens)
    assert step is not None and 1 / step.seconds_per_token == pytest.approx(found.prediction.generated_tokens_per_s)
    assert from_json(Plan, to_json(found)) == found
    moved = replace(found, memory=tuple(term for term in found.memory if term.name != "draft head"))
    assert moved.draft_device is None and moved.sha256 != found.sha256


@pytest.mark.parametrize(
    ("known", "limits", "device"),
    [
        (both(), {}, "gpu"),
        (both(gpu_s=2 * CPU_S), {}, "cpu"),
        (both(gpu_bytes=4 * GIB), {}, "cpu"),  # more than there is
        (both(), {"gpu_layers": 0}, "cpu"),
        (both(), {"overrides": (("head", "cpu"),)}, "cpu"),  # drafts are made beside the model's head
        (both(), {"mode": "full"}, None),
        (Statistics(drafts=rates(False, 1.0)), {}, None),  # not worth it, so that no memory is taken for it
    ],
)
def test_which_device_drafts(known: Statistics, limits: dict[str, Any], device: str | None) -> None:
    found = planned(known, **limits)
    assert found.draft_device == device and [where for where, _ in draft_terms(found)] == [device] * bool(device)
    drafts = known.of_plan(found).drafts
    assert drafts is not None and drafts.reading is not None
    assert drafts.reading.on_gpu == (device == "gpu")


@pytest.mark.parametrize(("head", "n_rows"), [("gpu", 1), ("cpu", 0)])
def test_rows_of_a_head_that_the_cpu_computes_take_memory_where_the_models_head_lies(head: str, n_rows: int) -> None:
    trimmed = Statistics(drafts=replace(rates(False, CPU_S), head_rows_bytes=2**27))
    found = planned(trimmed, overrides=(("head", head),))
    assert found.draft_device == "cpu"
    beside = [(term.device, term.n_bytes) for term in found.memory if term.name == "draft vocabulary"]
    assert beside == [("gpu", 2**27)] * n_rows and found.n_bytes("gpu") <= found.vram_budget_bytes
    undrafted = planned(trimmed, mode="full", overrides=(("head", head),))
    assert "draft vocabulary" not in [term.name for term in undrafted.memory]


def test_a_source_without_memory_takes_none() -> None:
    found = planned(Statistics(drafts=DraftRates("n-grams", ACCEPTANCE, 1e-5)))
    assert found.mode == "exact" and draft_terms(found) == []


def test_where_no_head_fits_there_is_a_plan_without_drafts() -> None:
    known, huge = both(gpu_bytes=2**40, cpu_bytes=2**40), {"ram_budget_bytes": 2 * GIB}
    assert planned(known, **huge).mode == "full"
    with pytest.raises(UsageError, match="GiB of RAM"):
        planned(known, mode="exact", **huge)
    assert planned(replace(known, drafts=None), **huge).parts == planned(known, **huge).parts


def test_a_requested_chunk_gives_no_better_plan_than_the_search_without_one() -> None:
    """Drafts on either device are compared by one measure, of short and of long requests."""
    spec, profile = known_spec("qwen3.6-35b-a3b"), reference_profile("rtx-4070-12gb")
    known = DraftKnowledge(draft_head=MTP_HEAD).statistics(spec, profile, profile.machine.n_cores)
    asked = Limits(context_tokens=8192, vram_budget_bytes=10 * GIB)
    free, *pinned = (
        best_candidate(resolve(spec, profile, replace(asked, chunk_tokens=chunk), known), 4096)
        for chunk in (None, 512, 1024, 2048)
    )
    for each in pinned:
        ratios = each.request_s / free.request_s, each.long_request_s() / free.long_request_s()
        assert sum(ratios) > 2 * WORTH_IT, each.chunk_tokens
