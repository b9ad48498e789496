"""Steps of a fit whose results are kept, so that one that was broken off goes on behind the last that was saved."""

import time
from collections.abc import Callable

from hetero_ee.calibration.partial import PartialCalibration
from hetero_ee.calibration.run import SAVING_SHARE
from hetero_ee.weights.store.record import Arrays

OF = "/"  # between a step's name and an array's


class KeptSteps:
    """partial: where results are kept, None to keep nothing. save_every_s: at least, between two saves."""

    def __init__(
        self,
        partial: PartialCalibration | None = None,
        save_every_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._partial, self._clock, self._pause_s, self._saved_s = partial, clock, save_every_s, clock()
        self._arrays: Arrays = partial.load() if partial else {}  # what others have kept there stays

    def once(self, step: str, make: Callable[[], Arrays], forgets: str = "") -> Arrays:
        """The arrays, at least one, that `make` gives, or has given to an earlier run under the step's name.

        forgets: an array of another step, as "step/array", that is of no use once this one is done.
        """
        start = step + OF
        found = {name.removeprefix(start): array for name, array in self._arrays.items() if name.startswith(start)}
        if not found:
            found = make()
            self._arrays |= {start + name: array for name, array in found.items()}
            self._arrays.pop(forgets, None)
            self._save_in_time()
        return found

    def remove(self) -> None:
        """For when the fit is complete."""
        if self._partial is not None:
            self._partial.remove()

    def _save_in_time(self) -> None:
        start_s = self._clock()
        if self._partial is not None and start_s - self._saved_s >= self._pause_s:
            self._partial.save(self._arrays)
            self._saved_s = self._clock()
            self._pause_s = max(self._pause_s, (self._saved_s - start_s) / SAVING_SHARE)
