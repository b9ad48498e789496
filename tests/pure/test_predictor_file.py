"""Predictors of active neurons on disk: what was written is read, and what is damaged, foreign or senseless refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.errors import DiskFullError, StoreError
from hetero_ee.sparsity.prediction.file import layer_arrays, read_predictor, write_predictor
from hetero_ee.sparsity.prediction.predictor import LayerPredictor, NeuronPredictor, PredictorMeasurement
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.store.record import Arrays, checksummed, parsed_checksummed
from tests.calibration_support import KEY, FailingDisk, small_spec

RANK = 32
MEASURED = PredictorMeasurement(2.5, 0.8, 0.15, 0.07, 0.0009), PredictorMeasurement(1.25, 0.6, 0.1, 0.07, 0.003)


def some_predictor(seed: int = 0) -> NeuronPredictor:
    spec, random = small_spec(), torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(spec.n_layers):
        inner, outer = (
            quantize(torch.randn(shape, generator=random), "codebook")
            for shape in ((RANK, spec.hidden_size), (spec.ffn_size, RANK))
        )
        layers.append(LayerPredictor(inner, outer, torch.randn(spec.ffn_size, generator=random)))
    return NeuronPredictor(tuple(layers), MEASURED)


def written(folder: Path) -> Path:
    file = folder / "store.calibration.predictor"
    write_predictor(some_predictor(), KEY, "a text", file)
    return file


def test_what_was_written_is_read(tmp_path: Path) -> None:
    expected, found = some_predictor(), read_predictor(written(tmp_path), small_spec(), KEY)
    assert found is not None and found.measured == expected.measured and found.rank == RANK
    for one, other in zip(found.layers, expected.layers, strict=True):
        for name, array in layer_arrays(other).items():
            np.testing.assert_array_equal(layer_arrays(one)[name], array)
    assert found.chosen() == MEASURED[0]
    assert read_predictor(tmp_path / "none", small_spec(), KEY) is None


def test_another_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"made for another model or .* calibrate --sparsity predicted for this model"):
        read_predictor(written(tmp_path), small_spec(), "cd" * 32)


def with_value(name: str, at: Any, value: float) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name][at] = value

    return change


def with_record(old: bytes, new: bytes) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        record = arrays["record"].tobytes()
        assert old in record
        arrays["record"] = np.frombuffer(record.replace(old, new), np.uint8)

    return change


FAULTS: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "a bias that is NaN": (with_value("1/bias", 3, np.nan), "bias' has a value that is not finite"),
    "an infinite scale": (with_value("2/outer.scales", (0, 0, 3), np.inf), "outer.scales' has a value that is not"),
    "a codebook that does not ascend": (with_value("0/inner.codebook", 5, 31), "inner.codebook' is not a codebook"),
    "an entry that no kernel takes": (with_value("0/outer.codebook", 16, 99), "outer.codebook' is not a codebook"),
    "an exponent out of range": (with_value("0/outer.codebook", 0, 99), "outer.codebook' is not a codebook"),
    "another rank": (with_record(b'"rank": 32', b'"rank": 16'), "another type or shape"),
    "a rank of nothing": (with_record(b'"rank": 32', b'"rank": 0'), "rank is 0"),
    "a margin that is none": (with_record(b'"margin": 2.5', b'"margin": 2.6'), "nats at 2.6"),
    "a share out of range": (with_record(b'"recall": 0.8', b'"recall": 1.8'), "measures (1.8"),
    "a divergence that is NaN": (with_record(b'"kl_nats": 0.0009', b'"kl_nats": NaN'), "NaN"),
    "a record that is no JSON": (with_record(b"{", b"["), "damaged"),
    "a layer's array missing": (lambda arrays: arrays.pop("4/inner.tiles"), "inner.tiles' is missing"),
    "tiles of another type": (lambda arrays: arrays.update({"0/inner.tiles": np.zeros(4)}), "another type or shape"),
    "no record": (lambda arrays: arrays.pop("record"), "'record' is missing"),
    "an array too many": (lambda arrays: arrays.update({"5/bias": np.zeros(4)}), "'5/bias' is unknown"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_senseless_values_are_refused(tmp_path: Path, fault: str) -> None:
    file, (change, message) = written(tmp_path), FAULTS[fault]
    arrays = parsed_checksummed(file.read_bytes())
    change(arrays)
    file.write_bytes(checksummed(arrays))
    with pytest.raises(StoreError, match="is damaged") as raised:
        read_predictor(file, small_spec(), KEY)
    assert message in str(raised.value)
    assert str(raised.value).endswith("run hetero-ee calibrate --sparsity predicted again.")


def test_of_another_shape_it_is_refused(tmp_path: Path) -> None:
    file, spec = written(tmp_path), small_spec()
    for other in (replace(spec, n_layers=6), replace(spec, n_layers=4), replace(spec, ffn_size=2 * spec.ffn_size)):
        with pytest.raises(StoreError, match="is damaged"):
            read_predictor(file, other, KEY)


@pytest.mark.parametrize("position", [3, 40, -3])
def test_a_changed_byte_is_noticed(tmp_path: Path, position: int) -> None:
    file = written(tmp_path)
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    for content in (data, data[:20], data[:-5], b""):
        file.write_bytes(content)
        with pytest.raises(StoreError, match="is damaged"):
            read_predictor(file, small_spec(), KEY)


@pytest.mark.parametrize("operation", ["create_file", "write", "close_durably", "rename"])
def test_on_a_full_disk_the_former_one_stays(tmp_path: Path, operation: str) -> None:
    file = written(tmp_path)
    before = file.read_bytes()
    with pytest.raises(DiskFullError):
        write_predictor(some_predictor(seed=1), KEY, "other", file, FailingDisk(operation))
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
