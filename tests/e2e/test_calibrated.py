"""`hetero-ee convert --calibrate`: less divergence in the same bytes, the same store each time, resumed when killed."""

from pathlib import Path

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.errors import UsageError
from hetero_ee.evaluation.comparison import compare
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.quality import calibrated, stores
from hetero_ee.quality.calibrated import CalibratedMatrices
from hetero_ee.quality.stores import Rounding, make_rounded_store
from hetero_ee.quality.streamed import StreamedModel, opened
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.store.library import make_store
from hetero_ee.weights.store.manifest import read_manifest
from hetero_ee.weights.store.writer import partial_folder
from tests.command_line import Cli, complaint
from tests.families import FAMILIES, random_model, save_checkpoint
from tests.gguf_models import write_gguf
from tests.store_support import contents

STORY = "Once upon a time there was a little cat. It had a big red ball and a friend. They played all day.\n"
N_TOKENS = 600


def calibrated_store(folder: Path, target: Path, threads: int = 1, corrects: bool = False) -> Path:
    how = {"cache": target.parent / "cache", "output": target, "threads": threads}
    return make_rounded_store(folder, Rounding(corrects=corrects, texts=[STORY * 40], n_tokens=N_TOKENS), **how)


def test_predictions_diverge_less_in_the_same_bytes(stories260k: Path, tmp_path: Path, cache: Path) -> None:
    plain = make_store(stories260k, cache=cache, output=tmp_path / "plain")
    found = make_rounded_store(stories260k, Rounding(n_tokens=1024), cache=cache, output=tmp_path / "calibrated")
    assert (found / "weights.bin").stat().st_size == (plain / "weights.bin").stat().st_size
    divergence = [compare(stories260k, store, n_tokens=600, threads=1, seed=1) for store in (plain, found)]
    assert divergence[1].kl_nats.value < 0.9 * divergence[0].kl_nats.value
    assert read_manifest(found).quantizer == "codebook-calibrated"
    with Engine.from_pretrained(found, profile="off", threads=1) as engine:
        assert engine.generate("Once upon", max_new_tokens=3, temperature=0).text


def test_matrices_that_make_up_for_earlier_errors_diverge_less(stories260k: Path, tmp_path: Path, cache: Path) -> None:
    found = list[float]()
    for corrects in (False, True):
        how = {"cache": cache, "output": tmp_path / str(corrects)}
        store = make_rounded_store(stories260k, Rounding(corrects=corrects, n_tokens=1024), **how)
        found.append(compare(stories260k, store, n_tokens=600, threads=1, seed=1).kl_nats.value)
    assert found[1] < 0.9 * found[0], found


@pytest.mark.parametrize("corrects", [False, True])
def test_bytes_depend_neither_on_threads_nor_on_an_interruption(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, corrects: bool
) -> None:
    whole = contents(calibrated_store(tiny, tmp_path / "whole", corrects=corrects))
    assert contents(calibrated_store(tiny, tmp_path / "threads", threads=3, corrects=corrects)) == whole
    fit = CalibratedMatrices.__call__
    n_fitted = []

    def stopping(self: CalibratedMatrices, tensor: object, *rest: object) -> object:
        n_fitted.append(tensor)
        if len(n_fitted) == 7:
            raise KeyboardInterrupt
        return fit(self, tensor, *rest)

    monkeypatch.setattr(calibrated.CalibratedMatrices, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt):
        calibrated_store(tiny, tmp_path / "resumed", corrects=corrects)
    assert partial_folder(tmp_path / "resumed").is_dir()
    assert contents(calibrated_store(tiny, tmp_path / "resumed", corrects=corrects)) == whole
    assert len(n_fitted) == 7 + 12 - 6  # 3 layers of 4 matrices, of which 6 were kept


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calibration by a few tokens, without a tokenizer. Collects the matrices that are fitted."""
    found, quantize = list[object](), calibrated.quantize_for_inputs
    monkeypatch.setattr(calibrated, "quantize_for_inputs", lambda *args: (found.append(args), quantize(*args))[1])
    monkeypatch.setattr(stores, "require_checkpoint", lambda folder: None)
    monkeypatch.setattr(stores, "text_windows", lambda *args: [[1, 17, 130, 3, 99, 42, 7, 12], [5, 9, 77, 101]])
    monkeypatch.setattr(stores.Tokenizer, "load", lambda *args: None)
    return found


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_matrix_of_every_family_is_fitted(family: str, tmp_path: Path, fitted: list[object]) -> None:
    folder = save_checkpoint(random_model(family), tmp_path / "model")
    for name in ("calibrated", "corrected"):
        rounding = Rounding(corrects=name == "corrected", texts=[""])
        store = make_rounded_store(folder, rounding, cache=tmp_path / "cache", output=tmp_path / name)
        assert len(fitted) == len([each for each in read_manifest(store).entries if each.layout == "int4"]) > 0
        fitted.clear()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])  # which the file's own store keeps in other layouts
def test_codes_of_a_gguf_file_are_replaced_if_asked(kind: str, tmp_path: Path, fitted: list[object]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_gguf(random_model("llama", num_hidden_layers=2, **sizes), tmp_path / "m.gguf", lambda _: kind)
    folder = gguf_folder(tmp_path / "m.gguf", configuration_only=True)
    how = {"cache": tmp_path / "cache", "output": tmp_path / "store"}
    with pytest.raises(UsageError, match="keeps its own codes"):
        make_rounded_store(folder, Rounding(texts=[""]), **how)
    store = make_rounded_store(folder, Rounding(texts=[""]), quantizer="codebook", **how)
    assert read_manifest(store).quantizer.endswith("calibrated")
    assert len(fitted) == 8


def test_the_command_calibrates_on_a_text_or_on_the_models_own(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text(STORY * 40)
    for more in (["--text", text], []):
        target = tmp_path / f"store{len(more)}"
        ended = cli("convert", tiny, "--calibrate", *more, "-o", target, "-t", 1)
        assert ended.code == 0 and ended.out == f"{target}\n", ended.err
        assert read_manifest(target).quantizer == "codebook-calibrated"
    assert "add one" in complaint(cli("convert", tiny, "--text", text), 2)
    assert "leave out --quantizer" in complaint(cli("convert", tiny, "--calibrate", "--quantizer", "rtn"), 2)
    assert "--sparsity" in complaint(cli("convert", tiny, "--calibrate", "--sparsity", "0.5"), 2)


def test_matrices_that_no_text_passes_are_rounded_as_without_one(tmp_path: Path) -> None:
    folder = save_checkpoint(random_model("llama"), tmp_path / "model")
    fit = CalibratedMatrices(StreamedModel(*opened(folder), [[1, 17, 130]], map), map)
    values = torch.randn(32, 64)
    found = fit(TensorSpec("draft.fc", TensorRole.MATRIX, (32, 64)), values, "codebook", map)
    assert torch.equal(found.tiles, quantize(values, "codebook").tiles)


def test_text_must_be_long_enough(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has too few tokens \(1\); give one of at least 512"):
        make_rounded_store(tiny, Rounding(texts=["Hello"]), cache=tmp_path)


def test_short_and_repetitive_texts_are_warned_of(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    for n_repeats, is_short in ((20, True), (120, False)):
        text.write_text(STORY * n_repeats)
        ended = cli("convert", tiny, "--calibrate", "--text", text, "-o", tmp_path / f"store{n_repeats}", "-t", 1)
        assert ended.code == 0 and ("tokens, so other texts may get worse" in ended.err) == is_short, ended.err
        assert "The text repeats itself (" in ended.err
