"""A calibration on disk: it comes back as it was, appears whole or not at all, and whatever is wrong is refused."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_ee.calibration.file import read_calibration, write_calibration
from hetero_ee.calibration.routes import route_shapes
from hetero_ee.errors import DiskFullError, StoreError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.store import record
from hetero_ee.weights.store.calibration_files import CERTIFICATE_FILE, RECORD_FILE, TWO_FILES, calibration_folder
from hetero_ee.weights.store.record import Arrays, checksummed, parsed_checksummed
from tests.calibration_support import KEY, FailingDisk, same, small_spec, some_calibration
from tests.families import config_of

GOLDEN = Path(__file__).parents[1] / "golden" / "records"
SPEC = small_spec()
PREDICTOR = "exit_layers.2.predictor."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A calibration that was written."""
    place = calibration_folder(tmp_path / "store")
    write_calibration(some_calibration(SPEC), KEY, place)
    return place


def edit_tensors(folder: Path, change: Callable[[Arrays], object]) -> None:
    """Changes the arrays and has the checksum match again."""
    file = folder / RECORD_FILE
    arrays = parsed_checksummed(file.read_bytes())
    change(arrays)
    file.write_bytes(checksummed(arrays))


def header_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(parsed_checksummed((folder / RECORD_FILE).read_bytes())["record"].tobytes())
    return found


def with_header(folder: Path, content: bytes) -> None:
    edit_tensors(folder, lambda arrays: arrays.update(record=np.frombuffer(content, np.uint8)))


def edit_json(folder: Path, **changes: Any) -> None:
    with_header(folder, json.dumps(header_of(folder) | changes).encode())


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    """The calibration as an earlier version has written it, at commit 87fc6bc."""
    place = calibration_folder(tmp_path / "store")
    shutil.copytree(GOLDEN / "store.calibration", place)
    return place


def edit_old_json(folder: Path, **changes: Any) -> None:
    file = folder / TWO_FILES[0]
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_it_comes_back_to_the_last_bit(folder: Path) -> None:
    found = read_calibration(folder, SPEC, KEY)
    assert found is not None and same(found, some_calibration(SPEC))
    assert not same(found, some_calibration(SPEC, seed=1))
    assert sorted(file.name for file in folder.parent.iterdir()) == ["store.calibration"]


def test_one_with_the_gates_of_earlier_versions_opens_without_them(folder: Path) -> None:
    gates = [f"exit_layers.2.gate.{name}" for name in ("first", "first_bias", "second", "second_bias")]
    edit_tensors(folder, lambda tensors: tensors.update(dict.fromkeys(gates, np.ones(3, np.float32))))
    found = read_calibration(folder, SPEC, KEY)
    assert found is not None and same(found, some_calibration(SPEC))


def test_one_of_before_exits_were_followed_promises_no_speed(folder: Path) -> None:
    body = header_of(folder)
    del body["specee_depths"]
    with_header(folder, json.dumps(body).encode())
    found = read_calibration(folder, SPEC, KEY)
    assert found is not None and found.specee_depths == found.depth_statistics(is_drafted=False) == ()


def test_what_exits_are_planned_by_is_what_was_counted(folder: Path) -> None:
    """Of nine tokens 4, 0, 3, 1 and 1 have passed 1, 2, ... layers; judged are 1, 3 and what is near the last."""
    found = read_calibration(folder, SPEC, KEY)
    assert found is not None and found.specee_depths == (4, 0, 3, 1, 1)
    [known] = found.depth_statistics(is_drafted=False)
    assert known.exit_layers == (1, 2, 3, 4) and known.planned == (1, 3)
    assert known.shares == pytest.approx((4 / 9, 0, 3 / 9, 1 / 9))
    near = {2: 8 / 9, 4: 5 / 9}  # within two layers
    assert known.judged == pytest.approx((1, 1 - (1 - near[2]) ** 5, 1, 1 - (1 - near[4]) ** 5))


def test_it_tells_the_planner_its_rates(folder: Path) -> None:
    found = read_calibration(folder, SPEC, KEY)
    assert found is not None
    statistics = found.statistics()
    assert statistics.rates_at(2).exit_rate == found.at(2).metrics.exit_rate
    assert statistics.rates_at(4).precision == found.at(4).metrics.precision
    assert statistics.rates_at(4).refused_precision == found.at(4).metrics.refused_precision
    assert "a text" in statistics.source


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert read_calibration(tmp_path / "nothing", SPEC, KEY) is None


def test_a_new_one_takes_the_place_of_the_old(folder: Path) -> None:
    write_calibration(some_calibration(SPEC, seed=1), KEY, folder)
    found = read_calibration(folder, SPEC, KEY)
    assert found is not None and same(found, some_calibration(SPEC, seed=1))
    assert sorted(file.name for file in folder.parent.iterdir()) == ["store.calibration"]


@pytest.mark.parametrize("operation", ["write", "create_file", "close_durably", "rename"])
@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFullError), (errno.EIO, StoreError)])
def test_a_disk_that_fails_leaves_the_old_one_as_it_was(
    folder: Path, operation: str, number: int, error: type[StoreError]
) -> None:
    with pytest.raises(error, match="can't be written"):
        write_calibration(some_calibration(SPEC, seed=1), KEY, folder, FailingDisk(operation, number=number))
    found = read_calibration(folder, SPEC, KEY)
    assert found is not None and same(found, some_calibration(SPEC))
    assert sorted(file.name for file in folder.parent.iterdir()) == ["store.calibration"]


def test_what_a_killed_writer_left_is_in_nobodys_way(folder: Path) -> None:
    (folder / f"{RECORD_FILE}.new").touch()
    write_calibration(some_calibration(SPEC, seed=1), KEY, folder)
    assert [file.name for file in folder.iterdir()] == [RECORD_FILE]


def test_another_models_is_refused_with_the_way_out(folder: Path) -> None:
    with pytest.raises(StoreError, match=r"made for another model or other weights; run hetero-ee calibrate for"):
        read_calibration(folder, SPEC, "cd" * 32)


@pytest.mark.parametrize("version", [1, 2, 99])
def test_another_versions_is_refused_before_anything_else(folder: Path, version: int) -> None:
    edit_json(folder, version=version, unheard_of=1)
    with pytest.raises(StoreError, match=rf"format version {version}, .* version 3; run hetero-ee calibrate"):
        read_calibration(folder, SPEC, KEY)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": True},
        {"n_layers": 6},
        {"n_layers": 10**12},
        {"hidden_size": "48"},
        {"exit_layers": []},
        {"depths": {}},
        {"depths": None},
        {"unknown": 1},
        {"text": {"description": 1}},
        {"schedule": [3, 1]},
        {"schedule": [3, 3]},
        {"schedule": [5]},
        {"schedule": [0]},
        {"schedule": [10**400]},
        {"schedule": [2.0]},
        {"schedule": 2},
        {"schedule": None},
        {"specee_depths": [1, 2]},
        {"specee_depths": [0] * 5},
        {"specee_depths": [1, -1, 1, 1, 1]},
        {"specee_depths": [1, 1, 1, 1, 0.5]},
        {"schedule": [], "specee_depths": [1] * 5},
    ],
    ids=str,
)
def test_a_damaged_document_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit_json(folder, **changes)
    with pytest.raises(StoreError, match="hetero-ee calibrate"):
        read_calibration(folder, SPEC, KEY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exit_layer", 3),
        ("map_rank", 0),
        ("map_rank", 4),
        ("map_rank", 10**9),
        ("threshold", -0.5),
        ("threshold", None),
        ("threshold", "1"),
        ("metrics", {}),
        ("partial_threshold", 2.1),
        ("partial_threshold", -1.0),
        ("partial_threshold", None),
        ("walk", {}),
    ],
)
def test_a_damaged_exit_layer_is_refused(folder: Path, field: str, value: object) -> None:
    exit_layers = header_of(folder)["exit_layers"]
    exit_layers[1][field] = value
    edit_json(folder, exit_layers=exit_layers)
    with pytest.raises(StoreError, match=r"damaged.*hetero-ee calibrate"):
        read_calibration(folder, SPEC, KEY)


def test_a_schedule_of_exit_layers_without_a_partial_predictor_is_refused(folder: Path) -> None:
    body = header_of(folder)
    body["exit_layers"][2]["partial_threshold"] = None
    edit_json(folder, **body)
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "3.partial" in name])
    with pytest.raises(StoreError, match=r"the schedule names exit layer 3, which has no partial predictor"):
        read_calibration(folder, SPEC, KEY)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"{}", b'{"version": 3}'])
def test_a_document_that_is_none_is_refused(folder: Path, content: bytes) -> None:
    with_header(folder, content)
    with pytest.raises(StoreError, match="hetero-ee calibrate"):
        read_calibration(folder, SPEC, KEY)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.popitem(),
        lambda tensors: tensors.update(another=next(iter(tensors.values()))),
        lambda tensors: tensors["exit_layers.1.map.up"].fill(float("nan")),
        lambda tensors: tensors["exit_layers.1.predictor.first_bias"].fill(float("inf")),
        lambda tensors: tensors["exit_layers.3.partial_predictor.second"].fill(float("nan")),
        lambda tensors: tensors.pop("exit_layers.2.partial_predictor.first"),
        lambda tensors: tensors.pop("exit_layers.2.partial_predictor.second"),
        lambda tensors: tensors.update({"exit_layers.1.partial_predictor.second": tensors["exit_layers.1.map.bias"]}),
        lambda tensors: tensors.update({PREDICTOR + "second": tensors[PREDICTOR + "second"][:0]}),
        lambda tensors: tensors.update({PREDICTOR + "second": np.array(0.5, np.float32)}),
        lambda tensors: tensors.update({PREDICTOR + "second": tensors[PREDICTOR + "second"].repeat(10_000)}),
        lambda tensors: tensors.update({PREDICTOR + "first": tensors[PREDICTOR + "first"][:, :9]}),
        lambda tensors: tensors.update({PREDICTOR + "first": tensors[PREDICTOR + "first"].astype("float64")}),
        lambda tensors: tensors.update({"exit_layers.1.map.up": tensors["exit_layers.1.map.up"][:-1]}),
        lambda tensors: tensors.update({"exit_layers.1.map.bias": tensors["exit_layers.1.map.bias"].astype("float32")}),
        lambda tensors: tensors["exit_layers.4.drafted_predictor.second"].fill(float("nan")),
        lambda tensors: tensors.pop("exit_layers.1.drafted_predictor.second"),
    ],
    ids=[
        "missing",
        "too many",
        "map nan",
        "predictor inf",
        "partial nan",
        "partial missing",
        "partial without units",
        "partial unknown",
        "no units",
        "scalar units",
        "too many units",
        "fewer features",
        "double",
        "shape",
        "type",
        "drafted nan",
        "drafted without units",
    ],
)
def test_tensors_that_are_not_what_they_have_to_be_are_refused(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit_tensors(folder, change)
    with pytest.raises(StoreError, match=r"damaged.*hetero-ee calibrate"):
        read_calibration(folder, SPEC, KEY)


def test_arrays_that_only_earlier_versions_wrote_are_left_out(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"activations.layers.0.ffn.down": np.zeros(3, np.float32)}))
    assert same(read_calibration(folder, SPEC, KEY), some_calibration(SPEC))  # type: ignore[arg-type]


def test_routes_of_experts_come_back_whole_and_may_lack_in_files_of_earlier_versions(tmp_path: Path) -> None:
    spec = read_spec(config_of("qwen3-moe", num_hidden_layers=5))
    shapes = route_shapes(spec)
    assert len(shapes) == 2 * 4 and set(shapes.values()) == {(2, 7), (8,)}
    made = some_calibration(spec)
    write_calibration(made, KEY, tmp_path / "old")
    assert read_calibration(tmp_path / "old", spec, KEY).routes == {}  # type: ignore[union-attr]
    random = np.random.default_rng(0)
    routes = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    write_calibration(replace(made, routes=routes), KEY, tmp_path)
    found = read_calibration(tmp_path, spec, KEY)
    assert found is not None and found.routes.keys() == routes.keys()
    assert all(np.array_equal(found.routes[name], array) for name, array in routes.items())
    edit_tensors(tmp_path, lambda tensors: tensors.pop(f"routes.{next(iter(shapes))}"))
    with pytest.raises(StoreError, match=r"damaged.*hetero-ee calibrate"):
        read_calibration(tmp_path, spec, KEY)


@pytest.mark.parametrize("n_bytes", [0, 4, 8, 200, -1])
def test_a_file_that_is_cut_short_is_refused(folder: Path, n_bytes: int) -> None:
    file = folder / RECORD_FILE
    file.write_bytes(file.read_bytes()[:n_bytes])
    with pytest.raises(StoreError, match="hetero-ee calibrate"):
        read_calibration(folder, SPEC, KEY)


def test_a_hollow_file_is_refused_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GB that take no room on the disk would take it in memory."""
    os.truncate(folder / RECORD_FILE, 2**32)
    monkeypatch.setattr(record.hashlib, "sha256", None)  # it was read
    with pytest.raises(StoreError, match=r"has 4294967296 bytes; the calibration has at most [0-9]{6,8}\."):
        read_calibration(folder, SPEC, KEY)


def test_every_changed_byte_is_seen(folder: Path) -> None:
    file = folder / RECORD_FILE
    whole = file.read_bytes()
    for place in range(0, len(whole), len(whole) // 50):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StoreError, match="checksum"):
            read_calibration(folder, SPEC, KEY)


def test_links_and_other_files_are_not_followed(folder: Path, tmp_path: Path) -> None:
    file = folder / RECORD_FILE
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="link out of its folder"):
        read_calibration(folder, SPEC, KEY)


def test_the_two_files_of_earlier_versions_open(two_files: Path) -> None:
    found = read_calibration(two_files, SPEC, KEY)
    expected = some_calibration(SPEC)
    text = replace(expected.text, n_activation_tokens=150)
    assert found is not None and same(found, replace(expected, text=text, drafted=None))


def test_a_new_one_takes_the_place_of_two_files_and_their_certificate(two_files: Path) -> None:
    (two_files / CERTIFICATE_FILE).touch()
    write_calibration(some_calibration(SPEC, seed=1), KEY, two_files)
    assert [file.name for file in two_files.iterdir()] == [RECORD_FILE]
    found = read_calibration(two_files, SPEC, KEY)
    assert found is not None and same(found, some_calibration(SPEC, seed=1))


def cut_short(folder: Path) -> None:
    file = folder / TWO_FILES[1]
    file.write_bytes(file.read_bytes()[:-1])
    edit_old_json(folder, tensors_sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def flipped(folder: Path) -> None:
    file = folder / TWO_FILES[1]
    file.write_bytes(bytes([1]) + file.read_bytes()[1:])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: edit_old_json(folder, format="another"), "is not a calibration"),
        (lambda folder: edit_old_json(folder, version=2, unheard_of=1), "has format version 2"),
        (lambda folder: edit_old_json(folder, key="cd" * 32), "another model or other weights"),
        (lambda folder: edit_old_json(folder, unknown=1), "unknown is unknown"),
        (lambda folder: edit_old_json(folder, tensors_sha256="0" * 64), "checksum"),
        (lambda folder: (folder / TWO_FILES[0]).write_bytes(b"{"), "damaged"),
        (lambda folder: (folder / TWO_FILES[1]).unlink(), "is missing"),
        (lambda folder: os.truncate(folder / TWO_FILES[1], 2**32), "has at most"),
        (cut_short, "damaged"),
        (flipped, "checksum"),
    ],
    ids=["format", "version", "weights", "field", "checksum", "json", "missing", "long", "short", "bit"],
)
def test_damaged_files_of_earlier_versions_are_refused(
    two_files: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(two_files)
    with pytest.raises(StoreError, match=words):
        read_calibration(two_files, SPEC, KEY)
