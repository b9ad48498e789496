"""Stores the finished steps of a fit, so that a killed run can be resumed."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from hetero_ee.weights.store.filesystem import FileSystem, remove_if_there, replace_file, store_errors
from hetero_ee.weights.store.record import Arrays, checksummed, parsed_checksummed, read_if_there

IDENTITY = "identity"
OF = "/"  # between a step's name and an array's
N_ADDED = "n_added"  # the array of a sum that counts what was added to it
MAX_BYTES = 64 * 2**30
SAVING_SHARE = 0.05  # a wide model's equations have gigabytes


class Summed(Protocol):
    """Sums over numbered chunks of a text that a later run can continue."""

    def add_chunk(self, number: int) -> None: ...

    def arrays(self) -> Arrays:
        """Return the sums so far as arrays, from which `restore` can continue."""

    def restore(self, arrays: Arrays) -> None:
        """Continue from the `arrays` of an earlier run."""


class KeptSteps:
    """Arrays of a fit's finished steps, in memory and in one file that is always replaced as a whole.

    A damaged file, or one with another `identity` (hexadecimal), is ignored. All methods raise StoreError and
    DiskFullError.

    Args:
        file: None to save nothing.
        save_every_s: Minimum seconds between two saves.
        clock: Returns seconds.
    """

    def __init__(
        self,
        file: Path | None = None,
        identity: str = "",
        files: FileSystem | None = None,
        save_every_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._file, self._files, self._clock = file, files or FileSystem(), clock
        self._identity = np.frombuffer(bytes.fromhex(identity), np.uint8)
        self._pause_s, self._saved_s = save_every_s, clock()
        self._kept: dict[str, Arrays] = {}  # by step
        for name, array in self._loaded().items():
            step, _, short = name.partition(OF)
            self._kept.setdefault(step, {})[short] = array

    @property
    def exists(self) -> bool:
        return self._file is not None and os.path.lexists(self._file)

    def once(self, step: str, make: Callable[[], Arrays], forgets: str = "") -> Arrays:
        """Return the arrays (at least one) of this step: those of an earlier run, or else what `make` returns.

        Args:
            forgets: Another step, or an array of one as "step/array", that is not needed once this step is done.
        """
        if step not in self._kept:
            self._kept[step] = make()
            other, _, array = forgets.partition(OF)
            if array:
                self._kept.get(other, {}).pop(array, None)
            else:
                self._kept.pop(other, None)
            self._save_in_time()
        return dict(self._kept[step])

    def sum_up(self, step: str, sums: Summed, numbers: Sequence[int], added: Callable[[int], None]) -> None:
        """Add the chunks with these numbers to the sums, except those that an earlier run has added.

        Args:
            added: Called after each chunk, including those of an earlier run.
        """
        kept = dict(self._kept.get(step, {}))
        n_added = int(kept.pop(N_ADDED, np.zeros(1))[0])
        if kept:
            sums.restore(kept)
        for index, number in enumerate(numbers):
            if index >= n_added:
                sums.add_chunk(number)
                if self._is_time or index + 1 == len(numbers):
                    self._kept[step] = sums.arrays() | {N_ADDED: np.array([index + 1])}
                    self._save_in_time()
            added(number)

    def remove(self) -> None:
        if self._file is not None:
            with store_errors(self._file):
                remove_if_there(self._file, self._files)

    def _loaded(self) -> Arrays:
        data = None if self._file is None else read_if_there(self._file, MAX_BYTES, "an unfinished calibration")
        try:
            arrays = {} if data is None else parsed_checksummed(data)
        except ValueError:
            return {}
        is_ours = np.array_equal(arrays.pop(IDENTITY, np.zeros(0)), self._identity)
        return arrays if is_ours else {}

    @property
    def _is_time(self) -> bool:
        return self._file is not None and self._clock() - self._saved_s >= self._pause_s

    def _save_in_time(self) -> None:
        """Save all arrays if the last save is save_every_s ago, or longer if saving is slow (see SAVING_SHARE)."""
        if self._file is None or not self._is_time:
            return
        start_s = self._clock()
        arrays = {step + OF + name: array for step, kept in self._kept.items() for name, array in kept.items()}
        with store_errors(self._file):
            replace_file(self._file, checksummed(arrays | {IDENTITY: self._identity}), self._files)
        self._saved_s = self._clock()
        self._pause_s = max(self._pause_s, (self._saved_s - start_s) / SAVING_SHARE)
