"""The part of an engine that calibrates its model and stores the results next to the model's store.

Calibration code is imported only when a calibration starts, since most engines never calibrate.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.config import Progress, warner
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import UsageError, shown
from hetero_ee.options.engine import MODEL_OPTIONS, UNQUANTIZED
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits_opening import open_candidates
from hetero_ee.speculation.opening import DraftKnowledge
from hetero_ee.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hetero_ee.calibration.job import CalibrationJob, CalibrationOutcome, CalibrationRequest
    from hetero_ee.sparsity.job import PredictorOutcome, SparsityOutcome


class CalibratingEngine(ABC):
    """An engine that can calibrate its model."""

    calibrations: CalibrationPlace | None  # where they are kept; None for fp32 weights, which have no store
    drafts: DraftKnowledge  # the draft head or draft model

    @property
    @abstractmethod
    def executor(self) -> Executor:
        """The executor that runs the model and is measured."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer with which calibration texts are encoded."""

    @abstractmethod
    def _ending(self, executor: Executor) -> Ending:
        """Return the conditions that end texts."""

    def calibrate(
        self,
        request: "CalibrationRequest | None" = None,
        progress: Progress | None = None,
        *,
        texts: Sequence[str] | None = None,
        tokens: int | None = None,
        force: bool | None = None,
        certify: bool | None = None,
    ) -> "CalibrationOutcome":
        """Measure and fit this model's early exits, and write the calibration next to its store.

        If the model has a draft head or draft model, exits are also fitted for its candidates, for mode "specee".

        An existing calibration is returned unchanged. A new one takes minutes; if interrupted, the next call resumes
        it. This engine keeps running as it was opened. The next engine drafts with the calibration if that is faster.

        Args:
            request: What to calibrate. The keywords below change its fields.
            texts: Texts to calibrate on; None for the model's own.
            tokens: Number of their tokens to use.
            force: True calibrates even if there is a calibration.
            certify: True also certifies the exits, for mode "certified", unless they are certified already.

        Raises:
            UsageError: if a value is impossible, there is too little text, or the weights are fp32.
            ModelError: if the model writes no text of its own.
            StoreError: if the calibration can't be written.
            DiskFullError: if the disk is full.
        """
        from hetero_ee.calibration.job import CalibrationRequest, calibrate

        request = CalibrationRequest.of(request, texts=texts, n_tokens=tokens, force=force, certify=certify)
        job = self._job("a calibration", request, progress)
        captured = self.executor.capturing
        try:
            candidates = open_candidates(self.drafts, self.executor, warner(progress))
            return calibrate(replace(job, draft=candidates, needs_draft=self.drafts.is_asked))
        finally:
            self.executor.capture(captured)

    def calibrate_sparsity(
        self, request: "CalibrationRequest | None" = None, progress: Progress | None = None, target: float | None = None
    ) -> "SparsityOutcome":
        """Measure which FFN neurons this model can skip, and write the result next to its store, for `sparsity`.

        The model has to be opened with sparsity="dense". Existing results are returned unchanged.

        Args:
            request: As in `calibrate`.
            target: A share of neurons to measure in addition to those that "auto" is chosen from.

        Raises: HeteroError: as `calibrate` does.
        """
        from hetero_ee.calibration.job import CalibrationRequest
        from hetero_ee.sparsity.job import calibrate_sparsity

        job = self._job("sparsity", CalibrationRequest.of(request), progress)
        return calibrate_sparsity(job, () if target is None else (target,))

    def calibrate_predictor(
        self, request: "CalibrationRequest | None" = None, progress: Progress | None = None
    ) -> "PredictorOutcome":
        """Fit the predictor of this model's active neurons, and write it next to its store, for sparsity="predicted".

        The model needs ReLU and has to be opened with sparsity="unpredicted". An existing predictor is returned
        unchanged.

        Args:
            request: As in `calibrate`; None for 16,384 tokens of the model's own text.

        Raises: HeteroError: as `calibrate` does.
        """
        from hetero_ee.calibration.job import CalibrationRequest
        from hetero_ee.sparsity.job import PREDICTOR_TOKENS, calibrate_predictor

        request = CalibrationRequest(n_tokens=PREDICTOR_TOKENS) if request is None else CalibrationRequest.of(request)
        return calibrate_predictor(self._job("sparsity", request, progress))

    def _job(self, what: str, request: "CalibrationRequest", progress: Progress | None) -> "CalibrationJob":
        from hetero_ee.calibration.job import CalibrationJob

        if progress is not None and not callable(progress):
            raise UsageError(f"progress is {shown(progress)}; expected a function (stage, done, total).")
        if self.calibrations is None:
            quantizer = MODEL_OPTIONS["quantizer"]
            raise UsageError(f"{what} belongs to a store, and ", quantizer, f" {UNQUANTIZED} has none; leave that out.")
        ending = self._ending(self.executor)
        return CalibrationJob(self.executor, self.tokenizer, ending, self.calibrations, request, progress)
