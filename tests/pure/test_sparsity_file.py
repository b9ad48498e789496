"""Sparsity curves on disk: what was written is read, and what is damaged, foreign or senseless is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_ee.errors import DiskFullError, StoreError
from hetero_ee.sparsity.file import read_sparsity, write_sparsity
from hetero_ee.weights.store.record import Arrays, checksummed, parsed_checksummed
from tests.calibration_support import KEY, FailingDisk, small_spec
from tests.sparse_models import some_curves


def written(folder: Path) -> Path:
    file = folder / "store.calibration.sparsity"
    write_sparsity(some_curves(small_spec().n_layers), KEY, "a text", file)
    return file


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file, spec = written(tmp_path), small_spec()
    expected, found = some_curves(spec.n_layers), read_sparsity(file, spec, KEY)
    assert found is not None and found.measured == expected.measured
    np.testing.assert_array_equal(found.thresholds, expected.thresholds)
    np.testing.assert_array_equal(found.errors, expected.errors)
    assert found.at(0.33) == expected.at(0.33)
    assert read_sparsity(tmp_path / "none", spec, KEY) is None


def test_another_models_is_refused(tmp_path: Path) -> None:
    file, spec = written(tmp_path), small_spec()
    for others in ((spec, "cd" * 32), (replace(spec, n_layers=6), KEY)):
        with pytest.raises(StoreError, match=r"made for another model .* calibrate --sparsity auto for"):
            read_sparsity(file, *others)


def with_value(name: str, value: float) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name][1, 3] = value

    return change


def with_record(old: bytes, new: bytes) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        record = arrays["record"].tobytes()
        assert old in record
        arrays["record"] = np.frombuffer(record.replace(old, new), np.uint8)

    return change


def with_array(name: str, array: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: array})


FAULTS: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "a threshold that is NaN": (with_value("thresholds", np.nan), "'thresholds' has a value that is not finite"),
    "an infinite threshold": (with_value("thresholds", np.inf), "'thresholds' has a value that is not finite"),
    "a negative error": (with_value("errors", -1.0), "errors have a value that is negative or not"),
    "a threshold below the one before": (with_value("thresholds", 0.0), "thresholds don't ascend"),
    "a share out of range": (with_record(b'"share": 0.26', b'"share": 1.26'), "measures 1.26 left out"),
    "a target out of range": (with_record(b'"target": 0.25', b'"target": 0.99'), "nats at 0.99"),
    "a divergence that is NaN": (with_record(b'"kl_nats": 0.001', b'"kl_nats": NaN'), "NaN"),
    "a record that is no JSON": (with_record(b"{", b"["), "damaged"),
    "thresholds of another type": (with_array("thresholds", np.zeros((5, 20))), "another type or shape"),
    "errors of another shape": (with_array("errors", np.zeros((5, 3), np.float32)), "another type or shape"),
    "fewer layers of errors": (with_array("errors", np.zeros((4, 20), np.float32)), "have other layers"),
    "a record of another type": (
        with_array("record", np.zeros(4, np.float32)),
        "'record' is missing, or has",
    ),
    "an array too many": (with_array("more", np.zeros(4, np.float32)), "'more' is unknown"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_senseless_values_are_refused(tmp_path: Path, fault: str) -> None:
    file, (change, message) = written(tmp_path), FAULTS[fault]
    arrays = parsed_checksummed(file.read_bytes())
    change(arrays)
    file.write_bytes(checksummed(arrays))
    with pytest.raises(StoreError, match="is damaged") as raised:
        read_sparsity(file, small_spec(), KEY)
    assert message in str(raised.value) and str(raised.value).endswith("run hetero-ee calibrate --sparsity auto again.")


@pytest.mark.parametrize("position", [3, 40, -3])
def test_a_changed_byte_is_noticed(tmp_path: Path, position: int) -> None:
    file = written(tmp_path)
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    for content in (data, data[:20], data[:-5], b""):
        file.write_bytes(content)
        with pytest.raises(StoreError, match="is damaged"):
            read_sparsity(file, small_spec(), KEY)


@pytest.mark.parametrize("operation", ["create_file", "write", "close_durably", "rename"])
def test_on_a_full_disk_the_former_curves_stay(tmp_path: Path, operation: str) -> None:
    file, spec = written(tmp_path), small_spec()
    before = file.read_bytes()
    with pytest.raises(DiskFullError):
        write_sparsity(some_curves(spec.n_layers, seed=1), KEY, "other", file, FailingDisk(operation))
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
