"""The small hybrids trained for tests: transformers' texts, drafts that are often right, and any placement's tokens."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.hub.config_file import read_spec
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.weights.model_weights import as_stored
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store
from tests.e2e.test_exact_identity import Models, check_case
from tests.emulation import emulated, planned, prompt_of
from tests.exact_cases import drawn_cases
from tests.executor_support import Model, on_kernels

ASSETS = Path(__file__).parents[1] / "assets"
MOST_BYTES = {"hybrid": 12_000_000, "hybrid_moe": 25_000_000}
PROMPT, N_TOKENS = "Once upon a time, there was a little", 64
N_CASES = 500


@pytest.mark.parametrize("name", MOST_BYTES)
def test_they_are_small_and_tell_transformers_stories(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ASSETS / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < MOST_BYTES[name]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(prompt, max_new_tokens=N_TOKENS, do_sample=False)[0, prompt.shape[1] :].tolist()
    with Engine.from_pretrained(folder, quantizer="none", profile="off", threads=1) as engine:
        found = engine.generate(PROMPT, max_new_tokens=N_TOKENS, ignore_eos=True, temperature=0.0)
    assert list(found.token_ids)[: len(expected)] == expected


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    opened = Models({name: ASSETS / name for name in MOST_BYTES})
    yield opened
    opened.close()


@pytest.mark.parametrize("part", range(20))
@pytest.mark.few(1)
def test_exact_says_what_full_says(part: int, models: Models) -> None:
    for case in drawn_cases(N_CASES)[part::20][: 3 if part == 0 else None]:
        check_case(replace(case, model="hybrid"), models, 40)


def test_drafts_of_the_mtp_layer_are_often_right_and_change_nothing(models: Models) -> None:
    n_right = n_checked = 0
    for case in [each for each in drawn_cases(N_CASES) if each.drafts in ("head", "n-grams and head")][:4]:
        plain = replace(case, model="hybrid", sampling="greedy", ending="length", grammar="", rule="always", n_drafts=1)
        counts = check_case(plain, models, 60)
        for found in counts.statistics(models.engine(plain).spec.n_layers, 0).origins:
            if found.origin == "draft head":
                n_right, n_checked = n_right + found.n_accepted, n_checked + found.n_checked
    assert 0.4 * n_checked < n_right < n_checked


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = ASSETS / "hybrid_moe"
    spec = read_spec(folder)
    store = convert(folder, spec, tmp_path_factory.mktemp("moe") / "store", Quantization.of_model(folder, None))
    weights = open_store(store, spec)
    return as_stored(spec, weights), weights


@pytest.mark.parametrize("placement", ["hot-0", "hot-3", "hot-8", "hot-16", "gpu", "cpu"])
def test_experts_split_anywhere_say_what_the_cpu_says(placement: str, moe: Model, kernels: Path) -> None:
    plan = planned(moe[0], overrides=((".*moe", placement), (".*", "gpu")), context_tokens=128, kv_type="fp32")
    text = [int(token) for token in torch.randint(2, 2048, (30,), generator=torch.Generator().manual_seed(1))]

    def logits(executor: Executor) -> torch.Tensor:
        found = executor.prompt(prompt_of(executor, executor.cache.open_new(), text))
        executor.close()
        return found.as_subclass(torch.Tensor)

    assert torch.equal(logits(emulated(*moe, plan)), logits(on_kernels(moe)))
