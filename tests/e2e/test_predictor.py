"""A predictor of active neurons from end to end, on the demo model's twin with ReLU: fitted, kept, used, refused."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine, UsageError
from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.calibration.run import CalibrationSettings
from hetero_ee.errors import StoreError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.sparsity.applied import planned_sparse
from hetero_ee.sparsity.factors import FactorTraining
from hetero_ee.sparsity.job import PREDICTOR_TOKENS, PredictorOutcome
from hetero_ee.sparsity.predictor import MAX_PREDICTED_KL_NATS, NeuronPredictor, write_predictor
from hetero_ee.sparsity.predictor_fit import FITTING
from hetero_ee.sparsity.request import PREDICTED, UNPREDICTED, SparsityRequest
from hetero_ee.weights.store.library import remove_stored, stored_models
from hetero_ee.weights.store.manifest import read_manifest
from tests.command_line import Cli
from tests.e2e.test_calibration import text_of
from tests.e2e.test_relu_twin import N_TOKENS, TWIN, openings

LONG: dict[str, Any] = {"max_new_tokens": N_TOKENS, "ignore_eos": True}
PROMPT = "Once upon a time, there was a little"
SETTINGS = CalibrationSettings(save_every_s=0.0)
WORDS = CalibrationRequest(texts=[text_of(800)], n_tokens=600, settings=SETTINGS)


@pytest.fixture(autouse=True)
def _short_fits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("hetero_ee.sparsity.job.FactorTraining", lambda: FactorTraining(n_steps=20))


def opened(sparsity: str) -> Engine:
    return Engine.from_pretrained(TWIN, sparsity=sparsity, threads=1, profile="off")


def calibrated(progress: Any = None, request: CalibrationRequest = WORDS) -> PredictorOutcome:
    with opened(UNPREDICTED) as engine:
        return engine.calibrate_predictor(request, progress)


@pytest.fixture
def outcome(cache: Path) -> PredictorOutcome:
    return calibrated()


def said(sparsity: str) -> tuple[object, float | None, float | None]:
    """Tokens with their log-probabilities, shares used and predicted."""
    with opened(sparsity) as engine:
        found = engine.generate(PROMPT, max_new_tokens=48, ignore_eos=True, logprobs=1)
        return (found.token_ids, found.logprobs), engine.neuron_share, engine.predicted_share


@pytest.mark.sample(0)
def test_calibrated_once_it_is_used_by_engines_to_come(outcome: PredictorOutcome) -> None:
    again, chosen = calibrated(), outcome.predictor.chosen()
    assert not again.is_new and again.predictor.measured == outcome.predictor.measured
    text, used, predicted = said(PREDICTED)
    assert text is not None and used is not None and predicted is not None
    assert 0 < used < predicted < 0.7 and chosen.recall > chosen.predicted_share and used < 0.15


@pytest.mark.slow  # the whole fit, to 8,192 tokens that the model writes: two minutes
def test_the_twin_s_neurons_are_predicted_as_well_as_docs_say(cache: Path) -> None:
    whole = CalibrationRequest(n_tokens=PREDICTOR_TOKENS, force=True)
    chosen = calibrated(request=whole).predictor.chosen()
    assert chosen.kl_nats <= MAX_PREDICTED_KL_NATS
    assert chosen.recall > 0.7 and chosen.predicted_share < 0.2 and chosen.active_share < 0.1
    texts = []
    for sparsity in (UNPREDICTED, PREDICTED):
        with opened(sparsity) as engine:
            texts.append([engine.generate(each, temperature=0, **LONG).token_ids for each in openings(200)])
    alike = [sum(accumulate((a == b for a, b in zip(*pair, strict=True)), min)) for pair in zip(*texts, strict=True)]
    assert sum(alike) / (len(alike) * N_TOKENS) > 0.6  # of all tokens, those before a text's first difference


def with_bias(predictor: NeuronPredictor, bias: float) -> NeuronPredictor:
    return replace(predictor, layers=tuple(replace(e, bias=torch.full_like(e.bias, bias)) for e in predictor.layers))


@pytest.mark.sample(0)
def test_where_every_neuron_is_predicted_the_text_is_that_of_all_to_the_bit(outcome: PredictorOutcome) -> None:
    with opened(UNPREDICTED) as engine:
        assert engine.calibrations is not None
        key = engine.calibrations.key
    write_predictor(with_bias(outcome.predictor, 1e6), key, "a text", outcome.file)
    everything, used, predicted = said(PREDICTED)
    write_predictor(with_bias(outcome.predictor, -1e6), key, "a text", outcome.file)
    _, _, nothing = said(PREDICTED)
    dense, active, none = said(UNPREDICTED)
    assert everything == dense and used == active and predicted == 1.0 and nothing == 0.0 and none is None


@pytest.mark.sample(0)
def test_what_was_broken_off_goes_on_to_the_same_bytes(outcome: PredictorOutcome) -> None:
    before, stages = outcome.file.read_bytes(), 0

    def interrupting(what: str, *_: object) -> None:
        nonlocal stages
        stages += what == FITTING
        if stages == 5:
            raise KeyboardInterrupt

    again = replace(WORDS, force=True)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        calibrated(interrupting, again)
    assert any("running it again resumes it" in note for note in interrupt.value.__notes__)
    partial = outcome.file.with_name(outcome.file.name + ".partial")
    assert partial.is_file()
    assert calibrated(request=again).is_new
    assert outcome.file.read_bytes() == before and not partial.exists()


@pytest.mark.sample(0)
def test_text_of_its_own_is_kept_too(cache: Path) -> None:
    request = CalibrationRequest(n_tokens=512, settings=SETTINGS)

    def interrupting(what: str, *_: object) -> None:
        if what == FITTING:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrated(interrupting, request)
    told: list[str] = []
    found = calibrated(lambda what, done, _: told.append(f"{what} {done}"), request)
    assert found.is_new and 0 < found.predictor.chosen().recall <= 1


@pytest.mark.sample(0)
def test_what_is_not_there_or_has_no_such_neurons_is_refused(tiny: Path, cache: Path) -> None:
    way_out = r"no calibrated predictor of active neurons; run hetero-ee calibrate --sparsity predicted"
    with pytest.raises(UsageError, match=way_out):
        opened(PREDICTED)
    for sparsity in (PREDICTED, UNPREDICTED):
        with pytest.raises(UsageError, match=r"has no neurons that are exactly 0 \(silu\); give the share"):
            Engine.from_pretrained(tiny, sparsity=sparsity, profile="off")
    request = SparsityRequest.parsed(PREDICTED)
    assert request is not None
    for folder in (None, TWIN):
        with pytest.raises(UsageError, match=way_out):
            planned_sparse(read_spec(TWIN), folder, cache, None, request)
    with opened("exact") as engine, pytest.raises(UsageError, match="open the model with sparsity='unpredicted'"):
        engine.calibrate_predictor()
    exact = next(model.path for model in stored_models(cache) if not read_manifest(model.path).first_in_rows)
    with pytest.raises(UsageError, match="a store that has no rows to predict"):
        Engine.from_pretrained(exact, sparsity=PREDICTED, profile="off")


@pytest.mark.sample(0)
def test_the_command_line_calibrates_plans_and_generates(cli: Cli, tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text(text_of(800))
    given = ("calibrate", "-m", TWIN, "--text", text, "--tokens", 600, "-t", 1, "--sparsity", "predicted")
    table = cli(*given)
    assert table.code == 0 and "\npredicted: " in table.out and "that are active; KL divergence 0.000" in table.out
    shown = json.loads(cli(*given, "--json").out)["predictor"]
    assert shown["rank"] == 32 and shown["kl_nats"] <= MAX_PREDICTED_KL_NATS
    there = cli("calibrate", "-m", TWIN, "--sparsity", "predicted", "--show", "--json")
    assert json.loads(there.out)["predictor"] == shown
    (store,) = stored_models(cache)
    plan = cli("plan", TWIN, "--sparsity", "predicted", "--hardware", "rtx-4060-laptop-8gb")
    assert plan.code == 0 and "damaged" not in plan.err and "Exact mode was declined: with calibration" in plan.out
    file = store.path.with_name(store.path.name + ".calibration.predictor")
    file.rename(tmp_path / file.name)
    lacking = cli("calibrate", "-m", TWIN, "--sparsity", "predicted", "--show")
    assert "Only the exits are calibrated; run hetero-ee calibrate --sparsity predicted for the" in lacking.err
    assert "predicted:" not in lacking.out
    (tmp_path / file.name).rename(file)
    assert cli("convert", TWIN, "--sparsity", "predicted").out.strip() == str(store.path)
    asked = SparsityRequest.parsed(PREDICTED)
    assert asked is not None
    planned = planned_sparse(read_spec(TWIN), TWIN, cache, None, asked)
    assert (planned.predictor_rank, planned.predicted_share) == (32, shown["predicted_share"])
    assert planned.active_shares == (shown["recall"] * shown["active_share"], shown["active_share"])
    on_paper = cli("plan", TWIN, "--sparsity", "predicted", "--hardware", "rtx-4060-laptop-8gb", "--json")
    assert on_paper.code == 0 and on_paper.err == ""  # the calibration of its exits is read, too
    ended = cli("generate", PROMPT, "-m", store.path, "-n", 12, "-t", 1, "--sparsity", "predicted", "--json")
    document = json.loads(ended.out)
    assert ended.code == 0 and 0 < document["neuron_share"] < document["predicted_share"] < 0.6
    ended = cli("generate", PROMPT, "-m", store.path, "-n", 12, "-t", 1, "--sparsity", "predicted")
    shares = document["neuron_share"], document["predicted_share"]
    assert "{:.0%} of FFN neurons used, {:.0%} predicted".format(*shares) in ended.err
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged"):
        opened(PREDICTED)
    file.with_name(file.name + ".partial").write_bytes(b"")
    remove_stored(store, cache)
    assert not [*file.parent.glob("*.predictor*")]
