"""The draft head that ships with the demo model: what it is worth, and that exact mode with it says what full does."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee import Engine, SamplingParams
from hetero_ee.decoding.requests import Ending
from hetero_ee.planning.times.memory import DRAFT_HEAD, MemoryTerm
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.drafts import ABSENT
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.draft_sources import taken
from tests.e2e.test_trained_models import OPENINGS
from tests.emulation import emulated, planned
from tests.exact_cases import Run
from tests.placements import split_at

N_TOKENS, MAX_HEAD_BYTES = 40, 2_500_000
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def head(demo: Path) -> Path:
    folder = demo / "draft_head"
    if not folder.is_dir():
        pytest.skip("the demo model's draft head is not in hetero_ee/assets")
    return folder


@pytest.fixture(scope="module")
def engine(demo: Path, kernels: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(demo, quantizer="codebook", threads=1) as engine:
        yield engine


def run_of(engine: Engine, **sampling: Any) -> Run:
    prompts = [engine._tokenizer.encode(text) for text in OPENINGS[:3]]
    ending = Ending(engine._eos_token_ids, engine.context_tokens)
    return Run(engine, prompts, SamplingParams(N_TOKENS, seed=3, **sampling), ending)


def drafting_with(head: Path, executor: Executor, running: Any = None) -> Drafting:
    source = open_draft_head(head, executor, running)
    return Drafting(0, 5, FixedThreshold(0.0), None, (source,))


@pytest.mark.parametrize(("sampling", "least"), [({}, 2.5), (SAMPLED, 2.0)], ids=["greedy", "sampled"])
def test_drafts_are_right_often_and_the_tokens_are_full_modes(
    head: Path, engine: Engine, sampling: dict[str, Any], least: float
) -> None:
    run, counts = run_of(engine, **sampling), DraftCounts()
    tokens = run.exact(drafting_with(head, engine.executor), counts=counts)
    assert tokens == run.full()
    statistics = counts.statistics(engine.spec.n_layers, 0)
    assert statistics.n_tokens / statistics.n_steps > least


@pytest.mark.parametrize("on_gpu", [False, True])
def test_on_an_emulated_machine_too_and_drafting_takes_its_time(head: Path, engine: Engine, on_gpu: bool) -> None:
    timeline = Timeline()
    plan = planned(engine.spec, overrides=split_at(6), context_tokens=engine.context_tokens)
    plan = replace(plan, memory=(*plan.memory, MemoryTerm("gpu" if on_gpu else "cpu", DRAFT_HEAD, 1)))
    executor = emulated(engine.spec, engine.executor.weights, plan, timeline=timeline)
    run, counts = run_of(engine), DraftCounts()
    drafting = drafting_with(head, executor, lambda: executor)
    assert run.exact(drafting, executor, counts) == run.full()
    lanes = {span.lane for span in timeline.spans if span.name.startswith("draft_head.") and span.end_s > span.start_s}
    assert lanes == {"gpu" if on_gpu else "cpu"}
    statistics = counts.statistics(engine.spec.n_layers, 0)
    assert statistics.n_tokens / statistics.n_steps > 2.5
    executor.close()


def test_its_vocabulary_is_trimmed_and_no_logit_of_it_changes(head: Path, engine: Engine, tmp_path: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    token_ids = config.pop("draft_token_ids")
    assert 0 < len(token_ids) < engine.spec.vocab_size
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(head / "model.safetensors", tmp_path / "model.safetensors")
    seen: list[list[Tensor]] = []
    for folder in (head, tmp_path):
        source = open_draft_head(folder, engine.executor)
        source.observe(0, 0, [5, 6], torch.ones(2, engine.spec.hidden_size))
        logits: list[Tensor] = []
        taken(source, [5, 6, 7], 3, lambda found, before, to=logits: to.append(found) or token_ids[len(before)])
        seen.append(logits)
    for trimmed, whole in zip(*seen, strict=True):
        assert torch.equal(trimmed[token_ids], whole[token_ids])
        assert int((trimmed > ABSENT).sum()) == len(token_ids)


def test_its_file_is_small_and_says_what_it_was_trained_on(head: Path) -> None:
    assert (head / "model.safetensors").stat().st_size < MAX_HEAD_BYTES
    assert '"texts"' in (head / "config.json").read_text()
