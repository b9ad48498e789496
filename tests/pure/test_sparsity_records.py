"""Files of `calibrate --sparsity`: read as written, refused if they are damaged or belong to another model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.errors import DiskFullError, StoreError, UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.sparsity.curves import read_sparsity, write_sparsity
from hetero_ee.sparsity.predictor import (
    LayerPredictor,
    NeuronPredictor,
    PredictorMeasurement,
    layer_arrays,
    read_predictor,
    write_predictor,
)
from hetero_ee.sparsity.request import SparsityRequest
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.store.record import Arrays, checksummed, parsed_checksummed
from tests.calibration_support import KEY, FailingDisk, small_spec
from tests.families import config_of
from tests.sparse_models import some_curves

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


@dataclass(frozen=True)
class Kind:
    """One kind of record: how it is made from a seed, written and read, and the option that measures it."""

    option: str
    make: Callable[[int], Any]
    write: Callable[..., None]
    read: Callable[..., Any]

    def written(self, folder: Path) -> Path:
        file = folder / "store.calibration.record"
        self.write(self.make(0), KEY, "a text", file)
        return file


KINDS = {
    "curves": Kind("auto", lambda seed: some_curves(small_spec().n_layers, seed), write_sparsity, read_sparsity),
    "predictor": Kind("predicted", some_predictor, write_predictor, read_predictor),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_curves_are_read_as_written(tmp_path: Path) -> None:
    spec = small_spec()
    expected, found = some_curves(spec.n_layers), read_sparsity(KINDS["curves"].written(tmp_path), spec, KEY)
    assert found is not None and found.measured == expected.measured
    np.testing.assert_array_equal(found.thresholds, expected.thresholds)
    np.testing.assert_array_equal(found.errors, expected.errors)
    assert found.at(0.33) == expected.at(0.33)


def test_a_predictor_is_read_as_written(tmp_path: Path) -> None:
    expected, found = some_predictor(), read_predictor(KINDS["predictor"].written(tmp_path), small_spec(), KEY)
    assert found is not None and found.measured == expected.measured and found.rank == RANK
    for one, other in zip(found.layers, expected.layers, strict=True):
        for name, array in layer_arrays(other).items():
            np.testing.assert_array_equal(layer_arrays(one)[name], array)
    assert found.chosen() == MEASURED[0]


def test_a_missing_file_is_none(kind: Kind, tmp_path: Path) -> None:
    assert kind.read(tmp_path / "none", small_spec(), KEY) is None


def test_another_models_is_refused(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"made for another model .* calibrate --sparsity {kind.option} for"):
        kind.read(kind.written(tmp_path), small_spec(), "cd" * 32)


def test_curves_of_fewer_layers_are_another_models(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="made for another model"):
        read_sparsity(KINDS["curves"].written(tmp_path), replace(small_spec(), n_layers=6), KEY)


def test_a_predictor_of_another_shape_is_damaged(tmp_path: Path) -> None:
    file, spec = KINDS["predictor"].written(tmp_path), small_spec()
    for other in (replace(spec, n_layers=6), replace(spec, n_layers=4), replace(spec, ffn_size=2 * spec.ffn_size)):
        with pytest.raises(StoreError, match="is damaged"):
            read_predictor(file, other, KEY)


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


def with_array(name: str, array: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: array})


Fault = tuple[Callable[[Arrays], None], str]
CURVE_FAULTS: dict[str, Fault] = {
    "a threshold that is NaN": (
        with_value("thresholds", (1, 3), np.nan),
        "'thresholds' has a value that is not finite",
    ),
    "an infinite threshold": (with_value("thresholds", (1, 3), np.inf), "'thresholds' has a value that is not finite"),
    "a negative error": (with_value("errors", (1, 3), -1.0), "errors have a value that is negative or not"),
    "a threshold below the one before": (with_value("thresholds", (1, 3), 0.0), "thresholds don't ascend"),
    "a share out of range": (with_record(b'"share": 0.26', b'"share": 1.26'), "measures 1.26 left out"),
    "a target out of range": (with_record(b'"target": 0.25', b'"target": 0.99'), "nats at 0.99"),
    "a divergence that is NaN": (with_record(b'"kl_nats": 0.001', b'"kl_nats": NaN'), "NaN"),
    "a record that is no JSON": (with_record(b"{", b"["), "damaged"),
    "thresholds of another type": (with_array("thresholds", np.zeros((5, 20))), "another type or shape"),
    "errors of another shape": (with_array("errors", np.zeros((5, 3), np.float32)), "another type or shape"),
    "fewer layers of errors": (
        with_array("errors", np.zeros((4, 20), np.float32)),
        "have other layers than its errors",
    ),
    "a record of another type": (
        with_array("record", np.zeros(4, np.float32)),
        "'record' is missing, or has",
    ),
    "an array too many": (with_array("more", np.zeros(4, np.float32)), "'more' is unknown"),
}
PREDICTOR_FAULTS: dict[str, Fault] = {
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
FAULTS = [
    pytest.param(kind, *fault, id=f"{kind}-{name}")
    for kind, faults in (("curves", CURVE_FAULTS), ("predictor", PREDICTOR_FAULTS))
    for name, fault in faults.items()
]


@pytest.mark.parametrize(("name", "change", "message"), FAULTS)
def test_senseless_values_are_refused(
    tmp_path: Path, name: str, change: Callable[[Arrays], None], message: str
) -> None:
    kind = KINDS[name]
    file = kind.written(tmp_path)
    arrays = parsed_checksummed(file.read_bytes())
    change(arrays)
    file.write_bytes(checksummed(arrays))
    with pytest.raises(StoreError, match="is damaged") as raised:
        kind.read(file, small_spec(), KEY)
    assert message in str(raised.value)
    assert str(raised.value).endswith(f"run hetero-ee calibrate --sparsity {kind.option} again.")


@pytest.mark.parametrize("position", [3, 40, -3])
def test_a_changed_byte_is_noticed(kind: Kind, tmp_path: Path, position: int) -> None:
    file = kind.written(tmp_path)
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    for content in (data, data[:20], data[:-5], b""):
        file.write_bytes(content)
        with pytest.raises(StoreError, match="is damaged"):
            kind.read(file, small_spec(), KEY)


@pytest.mark.parametrize("operation", ["create_file", "write", "close_durably", "rename"])
def test_on_a_full_disk_the_former_one_stays(kind: Kind, tmp_path: Path, operation: str) -> None:
    file = kind.written(tmp_path)
    before = file.read_bytes()
    with pytest.raises(DiskFullError):
        kind.write(kind.make(1), KEY, "other", file, FailingDisk(operation))
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2", "gemma4", "ministral3"])
def test_families_whose_layers_differ_are_refused(family: str) -> None:
    request = SparsityRequest.parsed(0.4)
    assert request is not None
    with pytest.raises(UsageError, match="differ, so their neurons can't be skipped; drop sparsity"):
        request.check(read_spec(config_of(family)))
