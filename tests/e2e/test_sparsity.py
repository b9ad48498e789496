"""Thresholded sparsity from end to end, on a random model: calibrated, kept beside the store, used, refused."""

import json
from pathlib import Path

import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.errors import StoreError
from hetero_ee.sparsity.job import SparsityOutcome
from hetero_ee.sparsity.request import DENSE
from hetero_ee.weights.store.calibration_files import SPARSITY_SUFFIX, neuron_file
from hetero_ee.weights.store.library import remove_stored, stored_models
from tests.command_line import Cli
from tests.e2e.test_calibration import text_of

PROMPT = "the cat saw a big"


def calibrated(model: Path, target: float | None = 0.5, *, force: bool = False) -> SparsityOutcome:
    with Engine.from_pretrained(model, sparsity=DENSE, threads=1, profile="off") as engine:
        request = CalibrationRequest(texts=[text_of(700)], n_tokens=700, force=force)
        return engine.calibrate_sparsity(request, target=target)


def test_calibrated_once_it_is_used_by_engines_to_come(tiny: Path, cache: Path) -> None:
    first = calibrated(tiny)
    assert first.is_new and first.file.is_file() and 0.5 in {each.target for each in first.curves.measured}
    again = calibrated(tiny)
    assert not again.is_new and again.curves.measured == first.curves.measured
    assert calibrated(tiny, 0.33).is_new and calibrated(tiny, None, force=True).is_new
    shares, texts = [], []
    for sparsity in (DENSE, 0.25, 0.7, "0.7"):
        with Engine.from_pretrained(tiny, sparsity=sparsity, threads=1, profile="off") as engine:
            texts.append(engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids)
            shares.append(engine.neuron_share)
    assert shares[0] == 1 and texts[2] == texts[3]
    assert shares[1] == pytest.approx(0.75, abs=0.12) and shares[2] == pytest.approx(0.3, abs=0.12)
    (model,) = stored_models(cache)
    remove_stored(model, cache)
    assert not first.file.exists()


def test_what_is_not_there_or_not_this_model_s_is_refused(tiny: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match="no calibration of neurons to skip; run hetero-ee calibrate --sparsity auto"):
        Engine.from_pretrained(tiny, sparsity=0.4, profile="off")
    assert not stored_models(cache)  # no store is made for it
    for opening, message in (({}, "not neuron-major"), ({"quantizer": "none"}, "quantizer none has none")):
        with (
            Engine.from_pretrained(tiny, profile="off", threads=1, **opening) as engine,
            pytest.raises(UsageError, match=message),
        ):
            engine.calibrate_sparsity()
    file = calibrated(tiny).file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged"):
        Engine.from_pretrained(tiny, sparsity="auto", profile="off")
    assert calibrated(tiny).is_new  # what is damaged is made again


def test_the_command_line_calibrates_and_generates(cli: Cli, tiny: Path, tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text(text_of(700))
    given = ("calibrate", tiny, "--text", text, "--tokens", 600, "-t", 1, "--sparsity", 0.4)
    table = cli(*given)
    assert table.code == 0 and "neurons left out: asked  on held-out text  KL divergence" in table.out
    found = json.loads(cli(*given, "--json").out)["sparsity"]
    measured = next(each for each in found if each["target"] == 0.4)
    assert measured["share"] == pytest.approx(0.4, abs=0.1) and measured["kl_nats"] >= 0
    (store,) = [model.path for model in stored_models(cache)]
    assert neuron_file(store, SPARSITY_SUFFIX).is_file()
    ended = cli("generate", PROMPT, "-m", tiny, "-n", 12, "-t", 1, "--sparsity", 0.4, "--json")
    assert ended.code == 0 and json.loads(ended.out)["neuron_share"] == pytest.approx(0.6, abs=0.15)
    assert "damaged" not in ended.err  # what calibrate wrote of exits, too, is of FFNs laid out so
