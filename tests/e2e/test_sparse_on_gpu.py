"""Neuron-major models on a GPU: the stand-in computes what the CPU does, an emulated one gives the CPU's very tokens,
and both count the same neurons."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.kv.cache import KvCache
from hetero_ee.models.spec import CURVE_POINTS, ModelSpec
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee_profiles.host.memory import MemoryInfo
from tests.e2e.test_calibration import text_of
from tests.emulation import LAPTOP, emulated, planned, prompt_of
from tests.executor_support import Model, on_kernels, reference
from tests.families import random_model, save_checkpoint
from tests.logged_machine import Log
from tests.sparse_models import WHOLE_NEURONS, stored_by_neurons, with_least, with_predictor
from tests.stand_in_machine import on_stand_in, reference_cpu, stand_in_gpu, torch_operations

HALF = ((r"layers\.0\..*", "gpu"), ("layers.*", "cpu"))
HOT = ((r"layers\.0\.ffn", "hot-1"), (r"layers\.1\.ffn", "hot-2"), (".*", "gpu"))
PLACES = {
    "split": HALF,
    "hot neurons": HOT,
    "all on the GPU": (("layers.*|head", "gpu"),),
    "streamed": (("layers.*", "stream"),),
}
TEXT = [1, 17, 30, 3, 99, 42, 7, 12, 9, 31]


@pytest.fixture(scope="module", params=["llama-relu", "llama-relu predicted", "opt", "opt predicted"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, *predicted = request.param.split()
    size = {"ffn_dim" if family == "opt" else "intermediate_size": 300}  # three sections
    folder = save_checkpoint(random_model(family, **size), tmp_path_factory.mktemp(family))
    if predicted:
        return with_predictor(stored_by_neurons(folder, WHOLE_NEURONS), bias=0.5)  # what is near it is not active
    return with_least(stored_by_neurons(folder), 0.5)


def read(executor: Executor) -> torch.Tensor:
    """Logits of a text: its first tokens as a prompt, the rest one by one and as a few together."""
    sequence, rows = executor.cache.open_new(), []
    executor.prompt(prompt_of(executor, sequence, TEXT[:FIRST_SPARSE]))
    for first, end in ((FIRST_SPARSE, FIRST_SPARSE + 1), (FIRST_SPARSE + 1, len(TEXT))):
        batch = Batch.of_sequence(sequence, first, TEXT[first:end])
        rows.append(executor.logits(batch, range(end - first)))
    return torch.cat(rows).as_subclass(torch.Tensor)


def run(model: Model, places: str, log: Log, make: Callable[..., PlannedExecutor]) -> tuple[torch.Tensor, float]:
    """Logits, and the share of neurons used."""
    plan = planned(model[0], overrides=PLACES[places], context_tokens=64)
    executor = make(*model, plan, wrap=log.machine)
    before = executor.neurons
    found, shares = read(executor), executor.neurons.since(before)
    executor.close()
    assert shares is not None
    return found, shares[0]


def kernels_cpu(spec: ModelSpec, weights: ModelWeights, cache: KvCache) -> HostExecutor:
    return CpuExecutor(spec, weights, cache.max_tokens, 1, cache=cache)


@pytest.mark.parametrize("places", PLACES)
def test_a_gpu_computes_what_the_cpu_does(model: Model, places: str, kernels: Path) -> None:
    alone, log, charged = reference(model), Log(), Log()
    expected, gpu = read(alone), stand_in_gpu(operations=log.gpu_operations(torch_operations()))
    make_cpu = kernels_cpu if places == "hot neurons" else reference_cpu
    found, share = run(model, places, log, lambda *a, **k: on_stand_in(*a, gpu, make_cpu=make_cpu, **k))
    assert (found - expected).norm() < 0.06 * expected.norm()  # as the CPU's kernels, see test_sparse_models.py
    assert share == pytest.approx(alone.neurons.n_used / alone.neurons.n_neurons, abs=0.02) and share < 0.8
    run(model, places, charged, emulated)
    assert charged.names == log.names, "an emulated GPU is charged for other steps"
    ffns = [each for each in log.runs if any(name.endswith("ffn") for name in each.names) and each.operations]
    steps = {"activate", "first_sections" if places == "hot neurons" else "sparse_ffn"}
    steps |= {"masked_linear" if model[0].predictor_rank else "matmul_int4"}
    assert ffns and any(steps <= set(each.operations) for each in ffns)


def test_an_emulated_gpu_changes_no_bit(model: Model, kernels: Path) -> None:
    alone = on_kernels(model, kind="fp16")
    expected = read(alone)
    for places in PLACES:
        found, share = run(model, places, Log(), emulated)
        assert torch.equal(found, expected) and share == alone.neurons.n_used / alone.neurons.n_neurons


def test_an_engine_s_sparse_model_takes_gpu_layers(demo: Path, cache: Path, tmp_path: Path) -> None:
    relu = random_model("llama-relu", vocab_size=read_spec(demo).vocab_size)
    folder, texts = save_checkpoint(relu, tmp_path / "relu", tokenizer_from=demo), []
    for arguments in ({"profile": "off"}, {"profile": LAPTOP, "emulate": True, "gpu_layers": 1}):
        with Engine.from_pretrained(folder, sparsity="exact", threads=1, **arguments) as engine:
            texts.append(engine.generate("Once upon", max_new_tokens=8).token_ids)
            assert engine.neuron_share is not None and 0 < engine.neuron_share < 0.8
    assert texts[0] == texts[1]


def test_a_calibrated_engine_divides_hot_neurons_first(
    demo: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order wherever there is a GPU, so that where they lie changes no token."""
    relu = random_model("llama-relu", vocab_size=read_spec(demo).vocab_size, intermediate_size=300)
    folder, texts = save_checkpoint(relu, tmp_path / "relu", tokenizer_from=demo), []
    with Engine.from_pretrained(folder, sparsity="dense", threads=1, profile="off") as engine:
        engine.calibrate_sparsity(CalibrationRequest(texts=[text_of(700)], n_tokens=700), target=0.5)
    for override in (["layers.*=gpu"], [r".*\.ffn=hot-1", "layers.*=gpu"]):
        placed = {"profile": LAPTOP, "emulate": True, "override": override}
        with Engine.from_pretrained(folder, sparsity="exact", threads=1, **placed) as engine:
            curve = engine.spec.hot_curve
            assert len(curve) == CURVE_POINTS and curve[CURVE_POINTS // 2] > 0.52
            texts.append(engine.generate("Once upon", max_new_tokens=8).token_ids)
            assert (engine.plan is not None and "hot-1" in engine.plan.decode_placements) or len(texts) == 1
    assert texts[0] == texts[1]
    with Engine.from_pretrained(folder, sparsity="exact", threads=1, profile="off") as engine:
        assert not engine.spec.hot_curve, "nothing is copied without a GPU"
    monkeypatch.setattr("hetero_ee.opening.memory_info", lambda host: MemoryInfo(2**30, 2**10, 0, None, None))
    with Engine.from_pretrained(folder, sparsity="exact", threads=1, profile=LAPTOP, emulate=True) as engine:
        assert not engine.spec.hot_curve, "nothing is copied that has no room"
