"""Every step that a plan can put on a GPU: what the emulated machine is charged for, the CUDA path runs, by the GPU's
operations. A new step needs its line here."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.memory import DRAFT_HEAD, MemoryTerm
from hetero_ee.runtime.choice import drafted
from hetero_ee.runtime.devices.device import CPU, GPU
from hetero_ee.runtime.devices.emulated import emulated_machine
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise, DraftVocabulary, StateMap, noise_words
from hetero_ee.runtime.execution import open_plan
from hetero_ee.runtime.executors.dummy import DummyExecutor, dummy_weights
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.predictor import ExitConfidence, ExitPredictor
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee.weights.model_weights import ModelWeights, is_quantized
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.weight import DenseWeight, TileWeight
from hetero_ee_profiles.reference import reference_profile
from tests.draft_heads import MODEL, save_head
from tests.drafted_generation import generate_exact
from tests.emulation import LAPTOP, emulated, planned
from tests.executor_support import Model, model_of
from tests.exit_patterns import Exiting, end_sequence, run_exiting
from tests.logged_machine import Crossing, Log
from tests.scripted_model import Says
from tests.stand_in_machine import on_stand_in, stand_in_gpu, torch_operations

CONTEXT_TOKENS, MAP_RANK = 128, 8
PROMPTS = [[1, 17, 30, 3, 99, 42, 42, 7, 12, 77, 101, 5, 64, 8, 9, 10, 3, 2, 55, 31], [7, 12]]
LAYER = r"layers\.\d+\."
# What the GPU is charged for -> what it must have computed then.
STEPS = {
    "embedding": {"embed"},
    f"{LAYER}attention": {"matmul_int4", "kv_write", "attention"},
    f"{LAYER}ffn": {"matmul_int4", "activate"},
    "head": {"matmul_int8"},
    "exit_map": {"matmul_int8"},
    "draft_choice": {"draft"},  # the position's noise and the likeliest token
    "exit_predictor": {"draft"},
    r"draft_head\.attention": {"matmul_int4", "kv_write", "attention"},
    r"draft_head\.ffn": {"matmul_int4", "activate"},
    "draft_vocabulary": {"matmul_int8"},
}
CROSSINGS = {
    "transfer to the gpu": "hidden states|draft embedding|verified states",
    "transfer to the cpu": "hidden states|logits|drafts|verified states",
    "copy to the gpu": f"{LAYER}(attention|ffn)",  # streamed weights; of visiting attentions keys and values too
    "copy to the cpu": f"{LAYER}attention back",  # new keys and values of those
}
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "all on the GPU": (("layers.*|head", "gpu"),),
    "split": ((r"layers\.0\..*", "gpu"), ("layers.*", "cpu"), ("head", "gpu")),
    "attention and FFN apart": ((".*attention", "cpu"), (".*ffn", "gpu"), ("head", "cpu")),
    "streamed": (("layers.*", "stream"),),
    "head alone": (("layers.*", "cpu"), ("head", "gpu")),
}
VISITING = "visiting"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama"))


def plan_of(spec: Any, places: str) -> Plan:
    from tests.pure.test_gpu_plans import visiting  # what is on the CPU visits the GPU for prompts

    overrides = PLACES["head alone" if places == VISITING else places]
    plan = planned(spec, overrides=overrides, context_tokens=CONTEXT_TOKENS)
    return visiting(plan) if places == VISITING else plan


def end_of(spec: Any, *, full_rank: bool = False, **changes: Any) -> DraftEnd:
    """Of a calibrated exit layer: a map and a predictor."""
    draw, size = torch.Generator().manual_seed(1), spec.hidden_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.1

    rank = size if full_rank else MAP_RANK
    exit_map = ExitMap(None if full_rank else random(rank, size), random(size, rank), random(size))
    predictor = ExitPredictor(*(random(*shape).numpy() for shape in ((64, 12), (64,), (64,), (1,))))
    judge = ExitConfidence(predictor)
    return DraftEnd(**({"state_map": exit_map.packed(compiled=True), "judge": judge} | changes))


def decode(executor: PlannedExecutor) -> None:
    """Texts in full mode and by exits: greedy, sampled, and with a penalty."""
    ending = Ending(frozenset(), CONTEXT_TOKENS)
    how = Drafting(1, 3, FixedThreshold(0.0), end_of(executor.spec))
    for sampling in ({}, {"temperature": 0.7}, {"repeat_penalty": 1.2}):
        common: Any = executor, PROMPTS, SamplingParams(8, **sampling), ending, str, lambda: 0.0
        expected, found = list(generate(*common)), list(generate_exact(*common, how))
        assert sorted(map(str, found)) == sorted(map(str, expected))


def exit_early(executor: PlannedExecutor) -> None:
    """A text whose tokens exit after each layer alternately."""
    n_layers, ids = executor.spec.n_layers, PROMPTS[1] * 3
    text = Exiting(ids, [1 + at % n_layers for at in range(len(ids))])
    sequence = executor.cache.open_new()
    run_exiting(executor, {sequence: text})
    end_sequence(executor, sequence)
    executor.cache.close(sequence)


def draft_with_head(executor: PlannedExecutor, folder: Path) -> None:
    """A text whose drafts a head on the GPU makes."""
    head = open_draft_head(save_head(folder), executor, lambda: executor)
    how = Drafting(0, 3, FixedThreshold(0.0), None, (head,))
    common: Any = executor, [[3, 4, 5]], SamplingParams(8), Ending(frozenset(), 60), str, lambda: 0.0
    assert len(list(generate_exact(*common, how))) == 8


def both(model: Model, plan: Plan) -> Iterator[tuple[PlannedExecutor, Log]]:
    """The plan on its emulated machine, then by all of the CUDA path but the card."""
    charged, run = Log(), Log()
    yield emulated(*model, plan, wrap=charged.machine), charged
    gpu = stand_in_gpu(operations=run.gpu_operations(torch_operations()))
    yield on_stand_in(*model, plan, gpu, run.machine), run


def unknown(log: Log) -> list[tuple[str, str]]:
    """What has no line in STEPS or CROSSINGS."""
    steps = CROSSINGS | {"gpu": "|".join(STEPS)}
    return [(where, name) for where, name in sorted(log.names) if not re.fullmatch(steps.get(where, ""), name)]


def not_computed(log: Log) -> list[str]:
    """Steps that were charged to a GPU which did something else meanwhile."""
    return [
        name
        for run in log.runs
        for name in run.names
        for pattern, operations in STEPS.items()
        if re.fullmatch(pattern, name) and not operations <= set(run.operations)
    ]


def check(charged: Log, run: Log) -> None:
    assert charged.names - run.names == set(), "the emulated machine knows steps that the CUDA path does not"
    assert run.names - charged.names == set(), "the CUDA path runs steps that nobody is charged for"
    assert unknown(charged) == unknown(run) == []
    assert not_computed(run) == []


@pytest.mark.parametrize("places", [*PLACES, VISITING])
@pytest.mark.sample(1)
def test_what_is_charged_is_run(model: Model, places: str) -> None:
    logs = []
    for executor, log in both(model, plan_of(model[0], places)):
        decode(executor)
        exit_early(executor)
        executor.close()
        logs.append(log)
    check(*logs)
    expected = {"all on the GPU": "draft_choice", "head alone": "exit_map", "split": "exit_predictor"}.get(places)
    assert expected is None or ("gpu", expected) in logs[0].names


def test_a_draft_head_that_is_charged_to_the_gpu_runs_there(tmp_path: Path) -> None:
    plan = planned(MODEL, overrides=PLACES["all on the GPU"], context_tokens=60)
    plan = replace(plan, memory=(*plan.memory, MemoryTerm("gpu", DRAFT_HEAD, 2**20)))
    logs = []
    for executor, log in both((MODEL, tiles_of(MODEL)), plan):
        draft_with_head(executor, tmp_path / "head")
        executor.close()
        logs.append(log)
    assert ("gpu", "draft_head.attention") in logs[0].names
    check(*logs)


def tiles_of(spec: Any) -> ModelWeights:
    draw, weights = torch.Generator().manual_seed(2), ModelWeights({}, {}, "codebook")
    for tensor in all_tensors(decoder_blocks(spec)):
        values = torch.randn(*tensor.shape, generator=draw) * 0.1
        if is_quantized(tensor.role):
            quantizer = "int8" if tensor.role.value == "vocabulary" else "codebook"
            weights.matrices[tensor.name] = quantize(values, quantizer)
        else:
            weights.vectors[tensor.name] = 1 + values
    return weights


def test_a_step_that_the_cuda_path_lacks_is_found() -> None:
    charged, run = Log(), Log()
    charged.crossings.append(Crossing("transfer", "dreams", CPU, 8))
    with pytest.raises(AssertionError, match="knows steps that the CUDA path does not"):
        check(charged, run)


# What an exit's judging is made of, and what it moves.


@pytest.mark.parametrize("full_rank", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_composition_drafts_what_the_cpu_would(model: Model, temperature: float, full_rank: bool) -> None:
    spec, weights = model
    end, log = end_of(spec, full_rank=full_rank), Log()
    gpu = stand_in_gpu(operations=log.gpu_operations(torch_operations()))
    executor = on_stand_in(*model, plan_of(spec, "split"), gpu, log.machine)
    sequence = executor.cache.open_new()
    hidden = executor.run(Batch.of_sequence(sequence, 0, PROMPTS[0]), None, range(1))
    noise = [DraftNoise(temperature, 2**64 - 3, 1, position) for position in range(1, 1 + len(hidden))]
    log.clear()
    found = executor.draft(hidden, noise, end)  # more rows than one launch takes
    (run,) = [each for each in log.runs if each.names]
    once = ["rms_norm", *["matmul_int8"] * (1 if full_rank else 2), "add", "add", "matmul_int8", "draft"]
    assert list(run.operations) == 2 * once and run.names == ("exit_map", "head", "draft_choice", "exit_predictor")
    logits = executor.draft_logits(hidden, end)
    expected = [drafted(row, one, end.judge) for row, one in zip(logits, noise, strict=True)]
    assert [each.token_id for each in found] == [each.token_id for each in expected]
    assert [each.confidence for each in found] == pytest.approx([each.confidence for each in expected], abs=1e-5)
    alone = ReferenceExecutor(spec, weights, CONTEXT_TOKENS).draft(hidden.as_subclass(torch.Tensor), noise, end)
    assert sum(a.token_id == b.token_id for a, b in zip(alone, found, strict=True)) >= 0.8 * len(found)
    executor.close()


def test_a_draft_vocabulary_on_the_gpu(model: Model) -> None:
    """Rows of the head, states that are normed already, and the chosen token's probability."""
    spec, weights = model
    executor = on_stand_in(*model, plan_of(spec, "split"))
    token_ids = torch.arange(1, spec.vocab_size, 3)
    rows = weights.matrices[executor.blocks[-1].tensors["tokens"].name]
    assert isinstance(rows, TileWeight)
    end = DraftEnd(is_normed=True, vocabulary=DraftVocabulary(rows.gathered(token_ids), token_ids))
    normed, noise = torch.randn(3, spec.hidden_size), [DraftNoise(0.9, 5, 0, position) for position in range(3)]
    logits = executor.draft_logits(normed, end)
    assert logits.shape == (3, len(token_ids))
    expected = [drafted(row, one, None, token_ids) for row, one in zip(logits, noise, strict=True)]
    found = executor.draft(normed, noise, end)
    assert [each.token_id for each in found] == [each.token_id for each in expected]
    assert [each.confidence for each in found] == pytest.approx([each.confidence for each in expected], abs=1e-5)
    executor.close()


def test_states_that_are_not_finite_draft_nothing(model: Model) -> None:
    executor, noise = on_stand_in(*model, plan_of(model[0], "split")), [DraftNoise(0.0, 0, 0, 1)] * 2
    hidden = torch.ones(2, model[0].hidden_size)
    hidden[1, 3] = float("nan")
    sound, spoiled = executor.draft(hidden, noise, DraftEnd(is_normed=True))
    assert sound.token_id >= 0 > spoiled.token_id
    executor.close()


# What a draft by exit moves over the link.

PAGE = Path(__file__).parents[2] / "docs" / "early_exit.md"
BIG, GREEDY = known_spec("llama-2-7b"), DraftNoise(0.0, 0, 0, 1)


def crossings(make_draft: Callable[[PlannedExecutor, torch.Tensor, DraftEnd], object]) -> list[Crossing]:
    """Of one draft after half the layers of Llama-2-7B's shape, which are on the GPU, with an exit map of rank 256."""
    log, profile = Log(), reference_profile(LAPTOP)
    places = ((r"layers\.([0-9]|1[0-5])\..*", "gpu"), ("layers.*|embedding", "cpu"), ("head", "gpu"))
    plan = planned(BIG, overrides=places)
    machine = log.machine(emulated_machine(profile, BIG, plan, Timeline()))
    executor = open_plan(
        BIG, dummy_weights(BIG), plan, machine, lambda layers: DummyExecutor(BIG, plan.context_tokens, layers)
    )
    nothing, rank = torch.zeros(1), 256
    up, down = (DenseWeight(nothing.expand(shape)) for shape in ((BIG.hidden_size, rank), (rank, BIG.hidden_size)))
    end = DraftEnd(state_map=StateMap(up, down, nothing), judge=Says(1.0))
    sequence = executor.cache.open_new()
    hidden = executor.run(Batch.of_sequence(sequence, 0, [5]), None, range(16))
    make_draft(executor, hidden, end)
    executor.close()
    return log.crossings


def on_the_gpu(executor: PlannedExecutor, hidden: torch.Tensor, end: DraftEnd) -> object:
    return executor.draft(hidden, [GREEDY], end)


def on_the_cpu(executor: PlannedExecutor, hidden: torch.Tensor, end: DraftEnd) -> object:
    """As it was: the map, the choice and the predictor on the CPU, wherever the head lies."""
    return executor.lm_head(executor.on_cpu(executor.final_norm(hidden)))


def test_the_page_says_what_a_draft_moves() -> None:
    place = ("slot and position of its keys and values", GPU, torch.zeros(2, 1, dtype=torch.int32).nbytes)
    noise = ("seed, sequence, position and temperature of its noise", GPU, noise_words([GREEDY]).nbytes)
    sums = []
    for make_draft, beside in ((on_the_cpu, [place]), (on_the_gpu, [place, noise])):
        embedding, *rest = ((each.name, each.to, each.n_bytes) for each in crossings(make_draft))
        assert embedding == ("hidden states", GPU, 4 * BIG.hidden_size)
        moved = [*beside, *rest]
        sums.append(sum(n_bytes for *_, n_bytes in moved))
        lines = [f"| {name} | {to.upper()} | {n_bytes:,} |" for name, to, n_bytes in moved]
        table = "\n".join([*lines, f"| **together, {len(moved)} copies** | | **{sums[-1]:,}** |"])
        assert table in PAGE.read_text(encoding="utf-8"), table
    assert sums[1] <= 64 < sums[0]
