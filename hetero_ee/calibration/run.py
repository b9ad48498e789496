"""Runs a calibration, and can resume it: chunks through the full model, then fits and metrics.

The result depends only on the model, the chunks and the settings. A resumed run gives the same numbers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from hetero_ee.calibration.drafted_fitting import DraftedParts, fit_drafted
from hetero_ee.calibration.fitting import fit_calibration, judging, of_part
from hetero_ee.calibration.predictor_fitting import PredictorTraining
from hetero_ee.calibration.routes import recorded_routes, route_shapes
from hetero_ee.calibration.schedule import ReadBytes, own_bytes
from hetero_ee.calibration.stages import (
    CHOOSE,
    HELD_OUT,
    TRAIN,
    Chunk,
    MapSums,
    draft_arrays,
    first_numbers,
    is_in,
    map_arrays,
    parsed_maps,
)
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.calibration.traces import ChunkDrafts, DraftedChunk, PartialLogits, joined, of_fields
from hetero_ee.config import Progress
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration, CalibrationText
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.weights.store.record import Arrays

ALGORITHM_VERSION = 7  # increases when the numbers or the steps change; runs of other versions are not resumed
CALIBRATING = "Calibrating"
MAP_SUMS = "map sums"  # a step


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Settings of a calibration. All but save_every_s affect its numbers."""

    precision: float = 0.9  # share of exits that have to be right when thresholds are chosen
    n_selection_tokens: int = 1024  # to choose ranks by
    n_schedule_tokens: int = 4096  # to choose the schedule by
    n_route_tokens: int = 4096  # whose experts are counted
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
        draft: DraftCandidates | None = None,
    ) -> None:
        self._executor, self._settings, self._progress, self._draft = executor, settings, progress, draft
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
        train = [number for number in range(len(chunks)) if is_in(number, TRAIN)]
        mapped = [*train, *first_numbers(chunks, CHOOSE, settings.n_selection_tokens)]
        n_before_drafts = sum(len(chunks[number]) for number in mapped)
        self._n_done, self._n_all = 0, n_before_drafts + sum(map(len, chunks))

        maps = parsed_maps(self._steps.once("maps", partial(self._fitted_maps, mapped), forgets=MAP_SUMS))
        self._n_done = n_before_drafts
        drafts, logits, drafted = self._drafts(maps)
        n_train, n_choose, n_held_out = (
            sum(len(chunk) - 1 for number, chunk in enumerate(chunks) if is_in(number, part))
            for part in (TRAIN, CHOOSE, HELD_OUT)
        )
        text = CalibrationText(description, n_train, n_choose, n_held_out)
        made = fit_calibration(executor, drafts, logits, maps, text, settings.precision, settings.training)
        made = replace(made, routes=self._routes())
        if self._draft is None:
            return made
        parts = DraftedParts(*(joined(of_part(drafted, part)) for part in (TRAIN, CHOOSE, HELD_OUT)))
        read = ReadBytes.of(executor.blocks, executor.weights)
        fit = partial(judging, precision=settings.precision, training=settings.training)
        own = [own_bytes(each, read) for each in made.exit_layers]
        return replace(made, drafted=fit_drafted(self._draft.title, parts, own, read, fit))

    def _routes(self) -> Arrays:
        pool = self._executor.pool
        if pool is None or not route_shapes(self._executor.spec):
            return {}
        chunks = [self._chunks[number] for number in first_numbers(self._chunks, TRAIN, self._settings.n_route_tokens)]
        return self._steps.once("routes", partial(recorded_routes, self._executor, pool, chunks))

    def _fitted_maps(self, numbers: Sequence[int]) -> Arrays:
        sums = MapSums(self._executor, self._chunks, self._map_exit_layers())
        self._steps.sum_up(MAP_SUMS, sums, numbers, self._tell)
        return map_arrays(sums.fitted())

    def _drafts(self, maps: dict[int, ExitMap]) -> tuple[list[ChunkDrafts], list[PartialLogits], list[DraftedChunk]]:
        """Return the drafts of all chunks, the partial logits of the first chunks of CHOOSE, and for all chunks the
        labels of the draft's candidates, if there is one."""
        scheduling = first_numbers(self._chunks, CHOOSE, self._settings.n_schedule_tokens)
        drafts, logits, drafted = [], [], []
        for number, chunk in enumerate(self._chunks):
            with_logits = number in scheduling
            make = partial(draft_arrays, self._executor, number, chunk, maps, self._draft, with_logits=with_logits)
            found = self._steps.once(f"drafts {number}", make)
            drafts.append(of_fields(ChunkDrafts, found))
            logits += [of_fields(PartialLogits, found)] if with_logits else []
            drafted += [of_fields(DraftedChunk, found)] if self._draft is not None else []
            self._tell(number)
        return drafts, logits, drafted

    def _tell(self, number: int) -> None:
        self._n_done += len(self._chunks[number])
        if self._progress:
            self._progress(CALIBRATING, self._n_done, self._n_all)

    def _map_exit_layers(self) -> list[int]:
        """Return the exit layers that get a map: all after a quarter of the layers, or evenly spread ones that fit in
        memory. Earlier layers predict hardly any token."""
        n_layers, hidden_size = self._executor.spec.n_layers, self._executor.spec.hidden_size
        exit_layers = range(max(1, n_layers // 4), n_layers)
        equation_bytes = 8 * (hidden_size + 1) * (2 * hidden_size + 1)
        n_maps = min(len(exit_layers), self._settings.max_equations_bytes // equation_bytes)
        return sorted({exit_layers[(2 * index + 1) * len(exit_layers) // (2 * n_maps)] for index in range(n_maps)})
