"""Records next to a store: other versions and weights are refused by name, and the files of earlier versions open."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hetero_ee.errors import StoreError
from hetero_ee.sparsity.curves import read_sparsity, write_sparsity
from hetero_ee.sparsity.order import read_order, write_order
from hetero_ee.sparsity.predictor import read_predictor, write_predictor
from hetero_ee.weights.store.record import OtherWeightsError, RecordArrays, RecordKind
from tests.calibration_support import KEY, small_spec

GOLDEN = Path(__file__).parents[1] / "golden" / "records"  # written at commit 87fc6bc
SPEC = small_spec()


@dataclass(frozen=True, slots=True)
class Header:
    text: str


KIND = RecordKind(Header, "list of numbers", 2, "count again and count")


def read(file: Path, kind: RecordKind[Header] = KIND, key: str = KEY) -> tuple[str, list[float]] | None:
    def make(header: Header, arrays: RecordArrays) -> tuple[str, list[float]] | None:
        numbers = arrays.take("numbers", np.float32, (3,)).tolist()
        return (header.text, numbers) if header.text else None

    return kind.read(file, key, 10**4, make)


def test_header_and_arrays_come_back(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    assert read(file) is None
    KIND.write(file, KEY, Header("some"), {"numbers": np.array([1, 2, 3], np.float32)})
    assert read(file) == ("some", [1.0, 2.0, 3.0])


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    file, older = tmp_path / "numbers", RecordKind(Header, "list of numbers", 1, "")
    older.write(file, KEY, Header("of other fields"), {})
    with pytest.raises(StoreError, match=r"the list of numbers /.* has format version 1, this engine reads version 2"):
        read(file)


def test_another_models_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    for text, key in (("some", "cd" * 32), ("", KEY)):
        KIND.write(file, key, Header(text), {"numbers": np.array([1, 2, 3], np.float32)})
        with pytest.raises(OtherWeightsError, match=r"for another model or other weights; count again and count for"):
            read(file)


@pytest.mark.parametrize("suffix", ["sparsity", "predictor", "order"])
def test_files_of_earlier_versions_open_and_are_written_as_they_were(tmp_path: Path, suffix: str) -> None:
    file, again = tmp_path / "store.calibration", tmp_path / "again"
    shutil.copy(GOLDEN / f"store.calibration.{suffix}", file)
    if suffix == "sparsity":
        curves = read_sparsity(file, SPEC, KEY)
        assert curves is not None
        write_sparsity(curves, KEY, "a text", again)
    elif suffix == "predictor":
        predictor = read_predictor(file, SPEC, KEY)
        assert predictor is not None
        write_predictor(predictor, KEY, "a text", again)
    else:
        order = read_order(file, SPEC, KEY)
        assert order is not None
        write_order(order, KEY, again)
    assert again.read_bytes() == file.read_bytes()
