"""The run of a calibration: chunks through the full model, then fits and metrics. It can be resumed.

The result depends only on the model, the chunks and the settings: a resumed run gives the same numbers.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from hetero_ee.calibration.fitting import fit_calibration
from hetero_ee.calibration.partial import KeptSteps, PartialCalibration
from hetero_ee.calibration.predictor_fitting import PredictorTraining
from hetero_ee.calibration.stages import (
    CHOOSE,
    HELD_OUT,
    TRAIN,
    ActivationStage,
    Chunk,
    DraftStage,
    MapStage,
    Stage,
    is_in,
)
from hetero_ee.calibration.texts import written_chunks
from hetero_ee.config import Progress
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration, CalibrationText

ALGORITHM_VERSION = 3  # increases when the numbers change; runs of other versions are not resumed
CALIBRATING = "Calibrating"
DONE = "done."  # before a stage's name in a partial file: chunks that it has seen, and whether it is finished


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Settings of a calibration. All but save_every_s decide its numbers."""

    precision: float = 0.9  # share of exits that have to be right when thresholds are chosen
    n_selection_tokens: int = 2048  # to choose ranks by
    n_activation_tokens: int = 1024  # to take activations of
    n_schedule_tokens: int = 4096  # to choose the schedule by
    max_equations_bytes: int = 2 * 2**30  # of normal equations; limits how many exit layers of a wide model get a map
    training: PredictorTraining = field(default_factory=PredictorTraining)
    save_every_s: float = 5.0  # at least, between two saves


def run_identity(key: str, text_identity: str, settings: CalibrationSettings) -> str:
    """Return a hash that differs between runs with other numbers. key: of the weights; text_identity: of the chunks."""
    values = asdict(settings)
    del values["save_every_s"]
    return hashlib.sha256(json.dumps([ALGORITHM_VERSION, key, text_identity, values]).encode()).hexdigest()


class CalibrationRun:
    """Runs the stages of a calibration. partial: where progress is saved, None to save nothing."""

    def __init__(
        self,
        executor: Executor,
        settings: CalibrationSettings,
        partial: PartialCalibration | None,
        progress: Progress | None = None,
    ) -> None:
        self._executor, self._settings, self._progress = executor, settings, progress
        self._steps = KeptSteps(partial)
        self._n_done = self._n_all = 0

    def calibrate(self, chunks: Sequence[Chunk], description: str) -> Calibration:
        """Run all stages on the chunks and fit the calibration.

        Args:
            chunks: At least SPLIT_CHUNKS, each of at least two tokens, the same in every run of the same identity.
            description: Of the chunks, for people.

        Raises:
            UsageError: No token has finite features.
            StoreError, DiskFullError: Progress can't be saved.
        """
        executor, settings = self._executor, self._settings
        activations = ActivationStage(executor.spec, executor.weights, chunks, settings.n_activation_tokens)
        maps = MapStage(executor, chunks, self._map_exit_layers(), settings.n_selection_tokens)
        drafts = DraftStage(executor, chunks, maps.maps, settings.n_schedule_tokens)
        stages: list[Stage] = [activations, maps, drafts]
        self._n_all = sum(len(chunks[number]) for stage in stages for number in stage.numbers)
        for stage in stages:
            self._pass(stage, chunks)
        train, choose, held_out = (
            sum(len(chunk) - 1 for number, chunk in enumerate(chunks) if is_in(number, part))
            for part in (TRAIN, CHOOSE, HELD_OUT)
        )
        return fit_calibration(
            executor,
            drafts.chunks,
            drafts.partial,
            maps.maps,
            CalibrationText(description, train, choose, held_out, activations.n_tokens),
            activations.means,
            settings.precision,
            settings.training,
        )

    def written(self, write: Callable[[int], Sequence[Chunk]], n_tokens: int) -> list[Chunk]:
        """Return chunks that the model writes: write(0), write(1), ... until they have n_tokens or a call gives none.

        Chunks that an earlier run has saved are not written again.
        """
        return written_chunks(write, n_tokens, self._steps, self._progress)

    def _pass(self, stage: Stage, chunks: Sequence[Chunk]) -> None:
        """Run the stage on all of its chunks, from where it was saved."""
        n_taken, is_finished = self._restored(stage)
        for index, number in enumerate(stage.numbers):
            if index >= n_taken:
                stage.add(number, chunks[number])
                self._save(stage, index + 1, is_finished=False)
            self._n_done += len(chunks[number])
            if self._progress:
                self._progress(CALIBRATING, self._n_done, self._n_all)
        if not is_finished:
            stage.finish()
        self._save(stage, len(stage.numbers), is_finished=True)

    def _restored(self, stage: Stage) -> tuple[int, bool]:
        """Restore the stage. Returns the number of chunks that it has seen, and whether it is finished."""
        start = f"{stage.name}."
        state = self._steps.arrays.get(DONE + stage.name)
        if state is None:
            return 0, False
        stage.restore(
            {name.removeprefix(start): array for name, array in self._steps.arrays.items() if name.startswith(start)},
            bool(state[1]),
        )
        return int(state[0]), bool(state[1])

    def _save(self, stage: Stage, n_taken: int, *, is_finished: bool) -> None:
        """Save every stage's arrays if it is time. Arrays of finished stages stay in memory for the next save."""
        if not (is_finished or self._steps.is_time):
            return
        start = f"{stage.name}."
        others = {name: array for name, array in self._steps.arrays.items() if not name.startswith(start)}
        self._steps.arrays = others | {start + name: array for name, array in stage.arrays().items()}
        self._steps.arrays[DONE + stage.name] = np.array([n_taken, int(is_finished)])
        self._steps.save_in_time()

    def _map_exit_layers(self) -> list[int]:
        """Return the exit layers that get a map: all, or evenly spread ones if memory allows no more."""
        n_exit_layers, hidden_size = self._executor.spec.n_layers - 1, self._executor.spec.hidden_size
        equation_bytes = 8 * (hidden_size + 1) * (2 * hidden_size + 1)
        n_maps = min(n_exit_layers, self._settings.max_equations_bytes // equation_bytes)
        return sorted({1 + (2 * index + 1) * n_exit_layers // (2 * n_maps) for index in range(n_maps)})
