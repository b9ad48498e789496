"""Runs a calibration, and can resume it: chunks through the full model, then fits and metrics.

The result depends only on the model, the chunks and the settings. A resumed run gives the same numbers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from hetero_ee.calibration.fitting import fit_calibration
from hetero_ee.calibration.predictor_fitting import PredictorTraining
from hetero_ee.calibration.stages import (
    CHOOSE,
    HELD_OUT,
    TRAIN,
    Activations,
    Chunk,
    MapSums,
    draft_arrays,
    first_numbers,
    is_in,
    map_arrays,
    parsed_maps,
)
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.calibration.traces import ChunkDrafts, PartialLogits, of_fields
from hetero_ee.config import Progress
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration, CalibrationText
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.weights.store.record import Arrays

ALGORITHM_VERSION = 5  # increases when the numbers or the steps change; runs of other versions are not resumed
CALIBRATING = "Calibrating"
MAP_SUMS = "map sums"  # a step


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Settings of a calibration. All but save_every_s affect its numbers."""

    precision: float = 0.9  # share of exits that have to be right when thresholds are chosen
    n_selection_tokens: int = 1024  # to choose ranks by
    n_activation_tokens: int = 1024  # to take activations of
    n_schedule_tokens: int = 4096  # to choose the schedule by
    max_equations_bytes: int = 2 * 2**30  # of normal equations; limits how many exit layers of a wide model get a map
    training: PredictorTraining = field(default_factory=PredictorTraining)
    save_every_s: float = 5.0  # at least, between two saves

    @property
    def identity(self) -> list[object]:
        """JSON value that differs between settings with different results."""
        return [ALGORITHM_VERSION, asdict(self) | {"save_every_s": None}]


class CalibrationRun:
    """Measures a model's exits and fits maps and predictors to them. `steps` stores finished steps."""

    def __init__(
        self,
        executor: Executor,
        settings: CalibrationSettings,
        steps: KeptSteps | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._executor, self._settings, self._progress = executor, settings, progress
        self._steps = steps or KeptSteps()
        self._chunks: Sequence[Chunk] = ()
        self._n_done = self._n_all = 0  # tokens

    def calibrate(self, chunks: Sequence[Chunk], description: str) -> Calibration:
        """Measure the chunks and fit the calibration.

        Args:
            chunks: At least SPLIT_CHUNKS, each of at least two tokens, the same in every run of the same identity.
            description: Description of the chunks for people.

        Raises:
            UsageError: if no token has finite features.
            StoreError, DiskFullError: if progress can't be saved.
        """
        self._chunks, executor, settings = chunks, self._executor, self._settings
        activated = first_numbers(chunks, TRAIN, settings.n_activation_tokens)
        train = [number for number in range(len(chunks)) if is_in(number, TRAIN)]
        mapped = [*train, *first_numbers(chunks, CHOOSE, settings.n_selection_tokens)]
        n_before_drafts = sum(len(chunks[number]) for number in (*activated, *mapped))
        self._n_done, self._n_all = 0, n_before_drafts + sum(map(len, chunks))

        activations = Activations(executor.spec, executor.weights, chunks)
        self._steps.sum_up("activations", activations, activated, self._tell)
        maps = parsed_maps(self._steps.once("maps", partial(self._fitted_maps, mapped), forgets=MAP_SUMS))
        self._n_done = n_before_drafts
        drafts, logits = self._drafts(maps)
        n_train, n_choose, n_held_out = (
            sum(len(chunk) - 1 for number, chunk in enumerate(chunks) if is_in(number, part))
            for part in (TRAIN, CHOOSE, HELD_OUT)
        )
        text = CalibrationText(description, n_train, n_choose, n_held_out, activations.n_tokens)
        return fit_calibration(
            executor, drafts, logits, maps, text, activations.means, settings.precision, settings.training
        )

    def _fitted_maps(self, numbers: Sequence[int]) -> Arrays:
        sums = MapSums(self._executor, self._chunks, self._map_exit_layers())
        self._steps.sum_up(MAP_SUMS, sums, numbers, self._tell)
        return map_arrays(sums.fitted())

    def _drafts(self, maps: dict[int, ExitMap]) -> tuple[list[ChunkDrafts], list[PartialLogits]]:
        """Return the drafts of all chunks, and the partial logits of the first chunks of CHOOSE."""
        scheduling = first_numbers(self._chunks, CHOOSE, self._settings.n_schedule_tokens)
        drafts, logits = [], []
        for number, chunk in enumerate(self._chunks):
            with_logits = number in scheduling
            make = partial(draft_arrays, self._executor, number, chunk, maps, with_logits=with_logits)
            found = self._steps.once(f"drafts {number}", make)
            drafts.append(of_fields(ChunkDrafts, found))
            logits += [of_fields(PartialLogits, found)] if with_logits else []
            self._tell(number)
        return drafts, logits

    def _tell(self, number: int) -> None:
        self._n_done += len(self._chunks[number])
        if self._progress:
            self._progress(CALIBRATING, self._n_done, self._n_all)

    def _map_exit_layers(self) -> list[int]:
        """Return the exit layers that get a map: all, or as many evenly spread ones as fit in memory."""
        n_exit_layers, hidden_size = self._executor.spec.n_layers - 1, self._executor.spec.hidden_size
        equation_bytes = 8 * (hidden_size + 1) * (2 * hidden_size + 1)
        n_maps = min(n_exit_layers, self._settings.max_equations_bytes // equation_bytes)
        return sorted({1 + (2 * index + 1) * n_exit_layers // (2 * n_maps) for index in range(n_maps)})
