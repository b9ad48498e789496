"""The measurements of an unfinished calibration, on disk."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hetero_ee.weights.store.filesystem import FileSystem, remove_if_there, replace_file, store_errors
from hetero_ee.weights.store.record import Arrays, checksummed, parsed_checksummed, read_if_there

IDENTITY = "identity"
OF = "/"  # between a step's name and an array's
MAX_BYTES = 64 * 2**30
SAVING_SHARE = 0.05  # a wide model's equations have gigabytes


class PartialCalibration:
    """The arrays that an unfinished run has measured, in one file, so that a killed run can be resumed.

    The file is always replaced as a whole. A damaged one, and one with another hexadecimal `identity`, counts as none.
    All methods raise StoreError and DiskFullError.
    """

    def __init__(
        self,
        file: Path,
        identity: str,
        files: FileSystem,
        save_every_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._file, self._files = file, files
        self._clock, self._pause_s, self._saved_s = clock, save_every_s, clock()
        self._identity = np.frombuffer(bytes.fromhex(identity), np.uint8)

    @property
    def exists(self) -> bool:
        return os.path.lexists(self._file)

    def load(self) -> Arrays:
        """Return the arrays that this run saved last, none if there is no such file."""
        data = read_if_there(self._file, MAX_BYTES, "an unfinished calibration")
        try:
            arrays = {} if data is None else parsed_checksummed(data)
        except ValueError:
            return {}
        is_ours = np.array_equal(arrays.pop(IDENTITY, np.zeros(0)), self._identity)
        return arrays if is_ours else {}

    def save(self, arrays: Arrays) -> None:
        """Replace what was saved before."""
        with store_errors(self._file):
            replace_file(self._file, checksummed(arrays | {IDENTITY: self._identity}), self._files)

    @property
    def is_time(self) -> bool:
        """Whether save_in_time would save now."""
        return self._clock() - self._saved_s >= self._pause_s

    def save_in_time(self, arrays: Arrays) -> None:
        """Replace what was saved before, but at most every save_every_s and in at most SAVING_SHARE of the time."""
        start_s = self._clock()
        if start_s - self._saved_s >= self._pause_s:
            self.save(arrays)
            self._saved_s = self._clock()
            self._pause_s = max(self._pause_s, (self._saved_s - start_s) / SAVING_SHARE)

    def remove(self) -> None:
        """Remove the file, once the calibration is complete."""
        with store_errors(self._file):
            remove_if_there(self._file, self._files)


class KeptSteps:
    """Results of a run's steps, as `arrays`. partial: where they are saved, None to save nothing."""

    def __init__(self, partial: PartialCalibration | None = None) -> None:
        self._partial = partial
        self.arrays: Arrays = partial.load() if partial else {}

    def once(self, step: str, make: Callable[[], Arrays], forgets: str = "") -> Arrays:
        """Return the arrays (at least one) that `make` returns, or returned in an earlier run for this step.

        Args:
            forgets: An array of another step, as "step/array", that is not needed once this step is done.
        """
        start = step + OF
        found = {name.removeprefix(start): array for name, array in self.arrays.items() if name.startswith(start)}
        if not found:
            found = make()
            self.arrays |= {start + name: array for name, array in found.items()}
            self.arrays.pop(forgets, None)
            self.save_in_time()
        return found

    @property
    def is_time(self) -> bool:
        """Whether save_in_time would save now."""
        return self._partial is not None and self._partial.is_time

    def save_in_time(self) -> None:
        """Save all arrays, unless the last save was a short time ago."""
        if self._partial is not None:
            self._partial.save_in_time(self.arrays)

    def remove(self) -> None:
        """Remove the file, once the fit is complete."""
        if self._partial is not None:
            self._partial.remove()
