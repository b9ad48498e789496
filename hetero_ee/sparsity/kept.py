"""Steps of a fit whose results are saved, so that an interrupted fit resumes after the last saved step."""

from collections.abc import Callable

from hetero_ee.calibration.partial import PartialCalibration
from hetero_ee.weights.store.record import Arrays

OF = "/"  # between a step's name and an array's


class KeptSteps:
    """Results of a fit's steps. partial: where they are saved, None to save nothing."""

    def __init__(self, partial: PartialCalibration | None = None) -> None:
        self._partial = partial
        self._arrays: Arrays = partial.load() if partial else {}  # other users' arrays there are kept

    def once(self, step: str, make: Callable[[], Arrays], forgets: str = "") -> Arrays:
        """Return the arrays (at least one) that `make` returns, or returned in an earlier run for this step.

        Args:
            forgets: An array of another step, as "step/array", that is not needed once this step is done.
        """
        start = step + OF
        found = {name.removeprefix(start): array for name, array in self._arrays.items() if name.startswith(start)}
        if not found:
            found = make()
            self._arrays |= {start + name: array for name, array in found.items()}
            self._arrays.pop(forgets, None)
            if self._partial is not None:
                self._partial.save_in_time(self._arrays)
        return found

    def remove(self) -> None:
        """Remove the file, once the fit is complete."""
        if self._partial is not None:
            self._partial.remove()
