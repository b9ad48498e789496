"""Calibrating on a disk that fails at one call after the other: one sentence, and the former calibration stays."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_ee import Engine
from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.errors import DiskFullError, StoreError
from tests.e2e.test_calibration import job, partial_file, text_of, written
from tests.store_support import FaultyDisk


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, threads=1) as opened:
        yield opened


@pytest.mark.few(2)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_failing_call_leaves_a_whole_calibration(engine: Engine, code: int, lasting: bool) -> None:
    """The former one, or the new one where that was in its place before the call; and the next run is in no way
    hindered.
    """
    former_request, request = (CalibrationRequest((text_of(700, seed),), 512) for seed in (1, 2))
    assert engine.calibrations is not None
    folder, failed = engine.calibrations.folder, set()
    job(engine, request)
    new = written(engine)
    for fail_at in range(1, 1000):
        job(engine, former_request)
        former = written(engine)
        disk = FaultyDisk(fail_at, OSError(code, os.strerror(code)), lasting=lasting)
        try:
            job(engine, request, files=disk)
        except StoreError as error:
            assert str(error).isprintable() and str(error).endswith(".") and str(folder) in str(error)
            assert isinstance(error, DiskFullError) == (code == errno.ENOSPC)
        if len(disk.calls) < fail_at:
            break
        failed.add(disk.calls[fail_at - 1])
        assert engine.calibrations.find() is not None
        is_renamed = disk.calls[: fail_at - 1].count("rename") > disk.calls[: fail_at - 1].count("create_file") - 2
        assert written(engine) in ([former, new] if is_renamed else [former]), f"{fail_at}: {disk.calls[fail_at - 1]}"
    assert {"write", "create_file", "create_folder", "close_durably", "rename", "remove_tree", "acquire_lock"} <= failed
    assert written(engine) == new and not partial_file(engine).exists()
    assert {path.name for path in folder.parent.iterdir() if path.name.startswith(folder.name)} <= {
        folder.name,
        f"{folder.name}.lock",
    }
