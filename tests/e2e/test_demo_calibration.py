"""The demo model ships calibrated: found for any store made of it, and true of it."""

import json
import shutil
from pathlib import Path

import pytest

from hetero_ee import Engine
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.calibration.texts import text_chunks
from hetero_ee.config import demo_model_folder
from hetero_ee.errors import StoreError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.quantization import Quantization

MAX_BYTES = 1_500_000
SCRIPTS = Path(__file__).parents[2] / "scripts"
STORY = (
    "Once upon a time there was a little boy named Ben. Ben had a red kite. One day he went to the park with his mom. "
    "The wind was very strong. Ben ran and ran, and the kite went up high in the sky. He was so happy! Then the wind "
    "took the kite away. Ben was sad. He looked for it in the trees and by the pond. A kind girl came to him. She "
    'said, "Do not be sad. I saw your kite. It is on the roof of my house." They walked to her house. Her dad got a '
    'big ladder and took the kite down. "Thank you!" said Ben. From that day on, Ben and the girl were best friends. '
)


def place(checkpoint: Path, store: Path, quantizer: str | None = None) -> CalibrationPlace:
    return CalibrationPlace(read_spec(checkpoint), store, checkpoint, Quantization.of_model(checkpoint, quantizer))


@pytest.fixture
def copy(demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo, tmp_path / "demo"))


def test_it_is_found_for_a_store_without_one_of_its_own(demo: Path, tmp_path: Path) -> None:
    found = place(demo, tmp_path / "store").find()
    assert found is not None
    assert [each.exit_layer for each in found.exit_layers] == list(range(1, 12))
    assert found.statistics().rates_at(8).exit_rate > 0.5


def test_it_has_a_schedule_of_exit_layers_with_partial_predictors(demo: Path, tmp_path: Path) -> None:
    found = place(demo, tmp_path / "store").find()
    assert found is not None
    assert 2 <= len(found.schedule) <= found.n_layers // 4
    assert all(each.partial_predictor is not None for each in found.exit_layers[1:])


def test_it_is_small(demo: Path) -> None:
    assert sum(file.stat().st_size for file in (demo / "calibration").iterdir()) < MAX_BYTES


def test_it_is_true_of_the_demo_model_on_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fp32 weights and text of our own, agreement and precision are about those that it was measured with."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from measure_exits import evaluate

    with Engine.from_pretrained(quantizer="none", threads=1) as engine:
        found = place(demo_model_folder(), Path("no store")).find()
        assert found is not None
        chunks = text_chunks(engine._tokenizer, [STORY * 4], 560, engine.context_tokens)[:8]
        measured = evaluate(engine.executor, found, chunks)
    n_tokens = sum(measured.depths.histogram)
    sigma = max(0.02, (0.25 / n_tokens) ** 0.5)
    for each, metrics in zip(found.exit_layers, measured.exit_layers, strict=True):
        assert abs(metrics.drafted_agreement - each.metrics.drafted_agreement) < 5 * sigma
        if metrics.exit_rate * n_tokens > 50:
            assert metrics.precision > each.metrics.precision - 5 * sigma


@pytest.mark.parametrize("change", ["weights", "configuration", "quantizer"])
def test_it_is_refused_for_another_model(copy: Path, tmp_path: Path, change: str) -> None:
    if change == "weights":
        file = copy / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif change == "configuration":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    with pytest.raises(StoreError, match=r"another model or other weights; run hetero-ee calibrate"):
        place(copy, tmp_path / "store", "rtn" if change == "quantizer" else None).find()


def test_a_checkpoint_without_one_has_none(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "calibration")
    assert place(copy, tmp_path / "store").find() is None
