"""A calibration from text to its place beside the store."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetero_ee.calibration.file import write_calibration
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.calibration.partial import PartialCalibration
from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings, run_identity
from hetero_ee.calibration.texts import (
    DEFAULT_TOKENS,
    MIN_CHUNKS,
    MIN_TOKENS,
    Chunk,
    chunks_identity,
    own_text_identity,
    own_writer,
    text_chunks,
)
from hetero_ee.config import Progress
from hetero_ee.decoding.texts import Ending
from hetero_ee.errors import ModelError, UsageError
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.store.calibration_files import PARTIAL_SUFFIX
from hetero_ee.weights.store.filesystem import FileSystem, store_lock

MAX_TOKENS = 10**7
OWN_TEXT = "texts of its own"
WAITING = "Another process is calibrating this model; waiting for it"


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """texts: None for the model's own. n_tokens: to calibrate on, as far as the texts have them. description: of the
    texts, for people."""

    texts: tuple[str, ...] | None = None
    n_tokens: int = DEFAULT_TOKENS
    description: str = "text"

    def __post_init__(self) -> None:
        if not MIN_TOKENS <= self.n_tokens <= MAX_TOKENS:
            raise UsageError(f"{self.n_tokens} tokens to calibrate on; expected {MIN_TOKENS} to {MAX_TOKENS}.")


@dataclass(frozen=True, slots=True)
class CalibrationOutcome:
    """folder: where it was written. seconds: what it took, without what an interrupted run had done before."""

    calibration: Calibration
    folder: Path
    seconds: float


def calibrate(
    executor: Executor,
    tokenizer: Tokenizer,
    ending: Ending,
    place: CalibrationPlace,
    request: CalibrationRequest,
    *,
    settings: CalibrationSettings | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    files: FileSystem | None = None,
) -> CalibrationOutcome:
    """Calibrates the model and writes the result to its place. A run that was killed is gone on with.

    Raises UsageError for texts that are too short, ModelError for a model that writes none or has one layer, StoreError
    and DiskFullError.
    """
    if executor.spec.n_layers < 2:
        raise ModelError("a model with one layer has none to exit from; there is nothing to calibrate.")
    start_s, files, settings = clock(), files or FileSystem(), settings or CalibrationSettings()
    with _one_at_a_time(place.folder, files, progress):
        key = place.key
        text = _Text.of(executor, tokenizer, ending, request)
        file = place.folder.with_name(place.folder.name + PARTIAL_SUFFIX)
        partial = PartialCalibration(file, run_identity(key, text.identity, settings), files)
        with _resumable(partial, place.folder):
            run = CalibrationRun(executor, settings, partial, clock, progress)
            calibration = run.calibrate(text.chunks(run, clock), text.description)
        write_calibration(calibration, key, place.folder, files)
        partial.remove()
    return CalibrationOutcome(calibration, place.folder, clock() - start_s)


@dataclass(frozen=True, slots=True)
class _Text:
    """What is calibrated on. given: None for the model's own text."""

    executor: Executor
    tokenizer: Tokenizer
    ending: Ending
    request: CalibrationRequest
    given: list[Chunk] | None
    identity: str

    @classmethod
    def of(cls, executor: Executor, tokenizer: Tokenizer, ending: Ending, request: CalibrationRequest) -> "_Text":
        if request.texts is None:
            identity = own_text_identity(tokenizer, request.n_tokens, ending.context_tokens)
            return cls(executor, tokenizer, ending, request, None, identity)
        given = text_chunks(tokenizer, request.texts, request.n_tokens, ending.context_tokens)
        return cls(executor, tokenizer, ending, request, given, chunks_identity(given))

    @property
    def description(self) -> str:
        return OWN_TEXT if self.given is None else self.request.description

    def chunks(self, run: CalibrationRun, clock: Callable[[], float]) -> list[Chunk]:
        """The chunks; own ones are written now. Raises ModelError where the model writes too few."""
        if self.given is not None:
            return self.given
        n_tokens = self.request.n_tokens
        chunks = run.written(own_writer(self.executor, self.tokenizer, self.ending, n_tokens, clock), n_tokens)
        if len(chunks) < MIN_CHUNKS:
            raise ModelError(
                f"this model ends its own texts at once ({len(chunks)} of {MIN_CHUNKS} texts needed); "
                "give texts to calibrate on with --text."
            )
        return chunks


@contextmanager
def _one_at_a_time(folder: Path, files: FileSystem, progress: Progress | None) -> Iterator[None]:
    """Keeps other processes from calibrating for the same place meanwhile."""
    with store_lock(folder, files, lambda: progress(WAITING, 0, 0) if progress else None):
        yield


@contextmanager
def _resumable(partial: PartialCalibration, folder: Path) -> Iterator[None]:
    """Notes on an interrupt what is kept, for whoever reports it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interrupt:
        then = "running it again goes on from there" if partial.exists else "nothing is kept of its first seconds"
        interrupt.add_note(f"the calibration for {folder} has stopped; {then}.")
        raise
