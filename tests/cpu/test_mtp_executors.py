"""An MTP layer on the CPU's kernels and beside split models: the full model's texts, and the plan's memory."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.hub.config_file import read_spec
from hetero_ee.options.engine import MTP_HEAD
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.memory import DRAFT_HEAD, MemoryTerm
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.head_source import head_facts
from hetero_ee.speculation.statistics import DraftCounts, OriginCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee.weights.model_weights import as_stored
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store
from hetero_ee_profiles.reference import reference_profile
from tests.device_support import held_bytes
from tests.draft_sources import taken
from tests.drafted_generation import generate_exact
from tests.emulation import LAPTOP, emulated, planned
from tests.executor_support import Model, on_kernels
from tests.mtp_models import DENSE, knowing_mtp
from tests.stand_in_machine import on_stand_in

CONTEXT_TOKENS = 128
PROMPTS = [[1, 17, 30, 3, 99, 42, 42], [7, 12]]
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "split": ((r"layers\.0\..*", "gpu"), ("layers.*|embedding", "cpu"), ("head", "gpu")),
    "all": (("layers.*|head", "gpu"),),
}
MACHINES: dict[str, Callable[[Model, Plan], Any]] = {
    "emulated": lambda model, plan: emulated(*model, plan),
    "stand-in": lambda model, plan: on_stand_in(*model, plan),
}


@pytest.fixture(scope="module", params=["hybrid", "dense", "experts"])
def model(request: pytest.FixtureRequest, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kinds = {"dense": DENSE, "experts": {"family": "qwen3.5-moe"}}
    sizes = {"vocab_size": 2048, "max_position_embeddings": 256} | kinds.get(request.param, {})
    folder = knowing_mtp(tmp_path_factory.mktemp(request.param) / "hf", demo, **sizes)
    spec = read_spec(folder)
    weights = open_store(convert(folder, spec, folder.parent / "store", Quantization.of_model(folder, None)), spec)
    return as_stored(spec, weights), weights


def plan_of(model: Model, places: str, head_bytes: int) -> Plan:
    plan = planned(model[0], overrides=PLACES[places], context_tokens=CONTEXT_TOKENS)
    room = (MemoryTerm("gpu", DRAFT_HEAD, head_bytes),) if head_bytes else ()
    return replace(plan, memory=(*plan.memory, *room))


def head_bytes(model: Model) -> int:
    costs = HeadCosts(head_facts(MTP_HEAD, model[0]), model[0], reference_profile(LAPTOP), 1)
    return costs.memory_bytes(CONTEXT_TOKENS, on_gpu=True)


def drafted(executor: Executor, running: Any) -> OriginCounts:
    """Exact mode with the MTP layer gives the tokens of full mode; what it drafted."""
    arguments: Any = PROMPTS, SamplingParams(40), Ending(frozenset(), CONTEXT_TOKENS), str, lambda: 0.0
    counts, source = DraftCounts(), open_draft_head(MTP_HEAD, executor, running, pytest.fail)
    expected = list(generate(executor, *arguments))
    how = Drafting(0, 4, FixedThreshold(0.0), None, (source,))
    found = list(generate_exact(executor, *arguments, how, counts))
    texts = [sorted((token.sequence, token.position, token.token_id) for token in each) for each in (expected, found)]
    assert texts[0] == texts[1]
    (origin,) = counts.statistics(executor.spec.n_layers, 0).origins
    return origin


@pytest.mark.parametrize("head", ["beside the CPU", "on the GPU"])
@pytest.mark.parametrize("places", sorted(PLACES))
@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.sample(2)
def test_texts_are_the_full_models_and_most_drafts_right(
    model: Model, kernels: Any, machine: str, places: str, head: str
) -> None:
    on_gpu = head == "on the GPU"
    executor = MACHINES[machine](model, plan_of(model, places, head_bytes(model) if on_gpu else 0))
    origin = drafted(executor, lambda: executor)
    assert origin.n_checked > 20 and origin.precision > 0.3
    executor.close()


def test_on_the_kernels_of_the_cpu_likewise(model: Model, kernels: Any) -> None:
    executor = on_kernels(model)
    assert drafted(executor, None).precision > 0.3
    executor.close()


def test_it_takes_no_more_of_the_gpu_than_the_plan_says(model: Model, kernels: Any) -> None:
    executor = on_stand_in(*model, plan_of(model, "split", head_bytes(model)))
    source, gpu = open_draft_head(MTP_HEAD, executor, lambda: executor, pytest.fail), executor.machine.gpu
    assert gpu is not None and held_bytes(gpu)[DRAFT_HEAD] == head_bytes(model)
    source.read_prompt(0, 0, [1, 2, 3], torch.ones(3, executor.spec.hidden_size))
    (beside,) = executor.machine.opened_beside
    inner: Any = beside.inner  # type: ignore[attr-defined]
    weights = sum(each.matrix.tiles.nbytes + each.matrix.scales.nbytes for each in inner._resident.matrices.values())
    assert 0 < weights + inner.cache.n_bytes <= head_bytes(model)
    executor.close()
    assert held_bytes(gpu) == {} and inner.cache.n_bytes == 0


def logits_of(source: DraftHeadSource, tokens: list[int]) -> list[Tensor]:
    """Of three drafts after the tokens."""
    found: list[Tensor] = []
    taken(source, tokens, 3, lambda logits, _: found.append(logits) or int(logits.argmax()))  # type: ignore[func-returns-value]
    return found


def test_whatever_was_drafted_and_forgotten_its_state_is_that_of_a_plain_run(model: Model, kernels: Any) -> None:
    """Random walks of drafts, verified tokens, corrections and second turns, against a source that only reads."""
    executor, draw = on_kernels(model), random.Random(7)
    generator = torch.Generator().manual_seed(7)
    used = open_draft_head(MTP_HEAD, executor)
    tokens, states = [draw.randrange(2048)], torch.randn(200, executor.spec.hidden_size, generator=generator)
    used.observe(0, 0, tokens, states[:1])
    for _ in range(12):
        if draw.random() < 0.3:  # an answer is taken back
            del tokens[draw.randint(1, len(tokens)) :]
            used.truncate(0, len(tokens))
        newest = draw.randrange(2048)
        taken(used, [*tokens, newest], draw.randint(1, 5))
        verified = [newest, *(draw.randrange(2048) for _ in range(draw.randint(0, 4)))]
        used.observe(0, len(tokens), verified, states[len(tokens) : len(tokens) + len(verified)])
        tokens += verified
        plain = open_draft_head(MTP_HEAD, executor)
        plain.observe(0, 0, tokens, states[: len(tokens)])
        logits = [logits_of(source, [*tokens, 5]) for source in (used, plain)]
        assert len(logits[0]) == 3 and all(map(torch.equal, *logits))
    executor.close()
