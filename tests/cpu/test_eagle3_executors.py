"""EAGLE-3 heads on the CPU's kernels and beside split models, in tiles: the same texts, and what crosses for them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.decoding.loop import generate
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.memory import DRAFT_HEAD, MemoryTerm
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER
from tests.cpu.test_draft_head_gpu import CONTEXT_TOKENS, ENDING, PROMPTS, by_text, watched
from tests.drafted_generation import generate_exact
from tests.eagle3_heads import DIALECTS, save_eagle3
from tests.emulation import emulated, planned
from tests.executor_support import Model, model_of, on_kernels
from tests.stand_in_machine import on_stand_in

FLOAT_BYTES = 4
KINDS = ["kernels", "emulated split", "stand-in split", "stand-in split, head", "stand-in all"]
GREEDY = SamplingParams(24)
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "split": ((r"layers\.[01]\..*", "gpu"), ("layers.*|embedding", "cpu"), ("head", "gpu")),
    "all": (("layers.*|head", "gpu"),),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    spec, weights = model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama"))
    return spec, ModelWeights(weights.matrices, weights.vectors, DEFAULT_QUANTIZER)


def plan_of(model: Model, places: str, *, head_on_gpu: bool) -> Plan:
    plan = planned(model[0], overrides=PLACES[places], context_tokens=CONTEXT_TOKENS)
    room = (MemoryTerm("gpu", DRAFT_HEAD, 2**20),) if head_on_gpu else ()
    return replace(plan, memory=(*plan.memory, *room))


def texts(executor: Executor, folder: Path, running: Any, counts: DraftCounts) -> list[Any]:
    source = open_draft_head(folder, executor, running, pytest.fail)
    how = Drafting(0, 4, FixedThreshold(0.0), None, (source,))
    return list(generate_exact(executor, *arguments(), how, counts))


def arguments() -> tuple[Any, ...]:
    return PROMPTS, GREEDY, ENDING, str, lambda: 0.0


@pytest.mark.few(6)
@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("place", KINDS)
@pytest.mark.sample(1)
def test_texts_are_the_full_models(model: Model, kernels: Any, tmp_path: Path, name: str, place: str) -> None:
    folder, counts = save_eagle3(tmp_path, DIALECTS[name], model=model[0]), DraftCounts()
    executor: Any
    if place == "kernels":
        executor, running = on_kernels(model), None
    else:
        machine, _, places = place.partition(" ")
        on_gpu = "head" in places or places == "all"
        plan = plan_of(model, places.split(",")[0], head_on_gpu=on_gpu)
        opened = emulated(*model, plan) if machine == "emulated" else on_stand_in(*model, plan, wrap=watched)
        executor, running = opened, lambda: opened
    expected = list(generate(executor, *arguments()))
    found = texts(executor, folder, running, counts)
    plain = [[(token.token_id, token.sequence) for token in by_text(each)] for each in (expected, found)]
    assert plain[0] == plain[1]
    (origin,) = counts.statistics(executor.spec.n_layers, 0).origins
    assert origin.n_drafted > 20
    executor.close()


@pytest.mark.sample(0)
def test_low_states_stay_on_the_gpu_and_the_others_cross_together(model: Model, kernels: Any, tmp_path: Path) -> None:
    """Layers 0 and 1 are on the GPU, so that of the states before layers 1 and 2 none is far from a head there; with
    the head on the CPU both cross in one transfer a pass."""
    dialect, crossed = DIALECTS["SpecForge"], {}
    folder = save_eagle3(tmp_path, dialect, model=model[0])
    assert dialect.captured == (1, 2)
    for on_gpu in (True, False):
        executor = on_stand_in(*model, plan_of(model, "split", head_on_gpu=on_gpu), wrap=watched)
        link: Any = executor.machine.link
        counts = DraftCounts()
        texts(executor, folder, lambda executor=executor: executor, counts)
        crossed[on_gpu] = Counter(name for name, _ in link.transfers)["captured states"]
        n_bytes = {n_bytes for name, n_bytes in link.transfers if name == "captured states"}
        assert all(each % (2 * FLOAT_BYTES * executor.spec.hidden_size) == 0 for each in n_bytes)
        if not on_gpu:
            n_passes = 2 * counts.n_passes  # at most: texts that verify together
            assert len(PROMPTS) < crossed[on_gpu] <= n_passes + len(PROMPTS)
        executor.close()
    assert crossed[True] == 0
