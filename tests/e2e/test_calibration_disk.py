"""Calibrating on a disk that fails at one call after the other: one sentence, and a whole calibration stays."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hetero_ee import Engine
from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.errors import DiskFullError, StoreError
from hetero_ee.speculation.exits.calibration import Calibration
from tests.e2e.test_calibration import job, partial_file, text_of, written
from tests.store_support import FaultyDisk


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def measured(engine: Engine) -> list[Calibration]:
    """Of two texts."""
    requests = (CalibrationRequest((text_of(700, seed),), 512) for seed in (1, 2))
    return [job(engine, request).calibration for request in requests]


class Measured:
    """In place of a run that measures: saves twice on the way, as that does, and has its calibration ready."""

    calibration: Calibration

    def __init__(self, executor: object, settings: object, steps: KeptSteps, *_: object) -> None:
        self._steps = steps

    def calibrate(self, chunks: object, description: str) -> Calibration:
        for number in range(2):
            self._steps.once(f"stage {number}", lambda: {"": np.ones(3, np.float32)})
        return self.calibration


@pytest.mark.few(2)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.sample(1)
def test_a_failing_call_leaves_a_whole_calibration(
    engine: Engine, measured: list[Calibration], monkeypatch: pytest.MonkeyPatch, code: int, lasting: bool
) -> None:
    """The former one, or the new one where the call came after its rename; and the next run is hindered in no way."""
    monkeypatch.setattr("hetero_ee.calibration.job.CalibrationRun", Measured)
    assert engine.calibrations is not None
    folder, failed, request = engine.calibrations.folder, set(), CalibrationRequest((text_of(700),), 512)
    Measured.calibration = measured[1]
    job(engine, request)
    new = written(engine)
    for fail_at in range(1, 1000):
        Measured.calibration = measured[0]
        job(engine, request)
        assert {path.name for path in folder.parent.glob(f"{folder.name}*")} == {folder.name}
        former = written(engine)
        Measured.calibration = measured[1]
        disk = FaultyDisk(fail_at, OSError(code, os.strerror(code)), lasting=lasting)
        try:
            job(engine, request, files=disk)
        except StoreError as error:
            assert str(folder) in str(error) and str(error).isprintable() and str(error).endswith(".")
            assert isinstance(error, DiskFullError) == (code == errno.ENOSPC)
        if len(disk.calls) < fail_at:
            break
        call = disk.calls[fail_at - 1]
        failed.add(call)
        n_renames = disk.calls[: fail_at - 1].count("rename")  # 2 of what was saved on the way, 1 of the record
        assert written(engine) == (former if n_renames < 3 else new), f"call {fail_at}, {call}"
        assert engine.calibrations.find() is not None
    assert {"create_file", "write", "close_durably", "rename", "remove_file", "acquire_lock"} <= failed
    assert written(engine) == new and not partial_file(engine).exists()
