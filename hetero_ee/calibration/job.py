"""Calibrates a model on text and writes the calibration next to its store, and the certificate of its exits."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from hetero_ee.calibration.certificate_file import MAX_PROMPTS, write_certificate
from hetero_ee.calibration.certify import (
    N_PROMPTS,
    CertificateRun,
    PromptSource,
    by_group,
    certificate_identity,
    kv_type_of,
)
from hetero_ee.calibration.file import write_calibration
from hetero_ee.calibration.following import specee_depths
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.calibration.partial import PartialCalibration
from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings, run_identity
from hetero_ee.calibration.stages import Chunk
from hetero_ee.calibration.texts import (
    MIN_CHUNKS,
    chunk_tokens,
    chunks_identity,
    own_prompts,
    own_text_identity,
    own_writer,
    prompt_tokens,
    text_chunks,
    text_prompts,
)
from hetero_ee.config import Progress
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import ModelError, StoreError, UsageError, shown
from hetero_ee.options.engine import CALIBRATION_TOKENS, TOKENS
from hetero_ee.options.option import is_whole
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import Certificate
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.store.calibration_files import CERTIFICATE_PARTIAL_SUFFIX, PARTIAL_SUFFIX, calibration_file
from hetero_ee.weights.store.filesystem import FileSystem, store_lock

OWN_TEXT = "texts of its own"
WAITING = "Another process is calibrating this model; waiting for it"

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """Text to calibrate on, and the settings of a calibration."""

    texts: Sequence[str] | None = None  # None for texts that the model writes itself
    n_tokens: int = CALIBRATION_TOKENS  # at most
    description: str = "text"  # of the texts, for people
    settings: CalibrationSettings = field(default_factory=CalibrationSettings)
    force: bool = False  # even if there is a calibration already
    certify: bool = False  # also make a certificate of its exits
    n_prompts: int = N_PROMPTS  # to certify on

    def __post_init__(self) -> None:
        """Raises UsageError."""
        is_texts = isinstance(self.texts, list | tuple) and all(isinstance(text, str) for text in self.texts)
        if self.texts is not None and not is_texts:
            raise UsageError(f"texts is {shown(self.texts)}; expected a list of strings, or None for the model's own.")
        TOKENS.check(self.n_tokens)
        if not isinstance(self.description, str):
            raise UsageError(f"description is {shown(self.description)}; expected a string.")
        if not isinstance(self.settings, CalibrationSettings):
            raise UsageError(f"settings is {shown(self.settings)}; expected CalibrationSettings(...).")
        if not is_whole(self.n_prompts, 1, MAX_PROMPTS):
            raise UsageError(f"n_prompts is {shown(self.n_prompts)}; expected 1 to {MAX_PROMPTS}.")
        for name in ("force", "certify"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {shown(getattr(self, name))}; expected True or False.")

    @classmethod
    def of(cls, request: object, **changes: Any) -> "CalibrationRequest":
        """Return the request, or the default one for None, with the changes that are not None. Raises: UsageError."""
        if request is not None and not isinstance(request, cls):
            raise UsageError(f"request is {shown(request)}; expected CalibrationRequest(...).")
        return replace(request or cls(), **{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True, slots=True)
class CalibrationOutcome:
    """A calibration that was made, or found."""

    calibration: Calibration
    folder: Path
    seconds: float  # of this run; 0 if it was found
    is_new: bool = True  # False if it was found
    certificate: Certificate | None = None  # if one was requested

    @property
    def date(self) -> str:
        """The day on which the file was written, in ISO 8601."""
        file = calibration_file(self.folder)
        assert file is not None, "it was read or written"
        return date.fromtimestamp(file.stat().st_mtime).isoformat()


def found_calibration(place: CalibrationPlace) -> CalibrationOutcome | None:
    """Return the store's calibration, or else its checkpoint's. Raises: StoreError: if it can't be used."""
    calibration, folder = place.find(), place.where()
    return None if calibration is None or folder is None else CalibrationOutcome(calibration, folder, 0.0, is_new=False)


def calibrate(
    executor: Executor,
    tokenizer: Tokenizer,
    ending: Ending,
    place: CalibrationPlace,
    request: CalibrationRequest,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    files: FileSystem | None = None,
) -> CalibrationOutcome:
    """Calibrate the model and write the result next to its store, unless a calibration exists already.

    A killed run is resumed. Only one process calibrates a store at a time; others wait and find its result.

    Raises:
        UsageError: The texts are too short.
        ModelError: The model has one layer, or ends its own texts at once.
        StoreError, DiskFullError: The calibration can't be written.
    """
    if executor.spec.n_layers < 2:
        raise ModelError("a model with one layer has none to exit from; there is nothing to calibrate.")
    job = _Job(executor, tokenizer, ending, place, request, progress, clock, files or FileSystem())
    with store_lock(place.folder, job.files, lambda: progress(WAITING, 0, 0) if progress else None):
        outcome = None if request.force else _usable(place, request, progress)
        outcome = outcome or job.calibrated()
        return replace(outcome, certificate=job.certified(outcome.calibration)) if request.certify else outcome


@dataclass(frozen=True, slots=True)
class _Job:
    """The inputs of one call, which has locked the store."""

    executor: Executor
    tokenizer: Tokenizer
    ending: Ending
    place: CalibrationPlace
    request: CalibrationRequest
    progress: Progress | None
    clock: Callable[[], float]
    files: FileSystem

    def calibrated(self) -> CalibrationOutcome:
        """Make a calibration and write it."""
        start_s, request, folder, key = self.clock(), self.request, self.place.folder, self.place.key
        n_tokens, context_tokens = request.n_tokens, self.ending.context_tokens
        if request.texts is None:
            chunks, identity = None, own_text_identity(self.tokenizer, n_tokens, context_tokens)
        else:
            chunks = text_chunks(self.tokenizer, request.texts, n_tokens, context_tokens)
            identity = chunks_identity(chunks)
        partial = self._partial(PARTIAL_SUFFIX, run_identity(key, identity, request.settings))
        with resumable(partial, folder):
            run = CalibrationRun(self.executor, request.settings, partial, self.progress)
            if chunks is None:
                write = self._writer(chunk_tokens(context_tokens, n_tokens))
                chunks = run.written(write, n_tokens)
                require_enough(len(chunks))
            calibration = run.calibrate(chunks, self._description)
        depths = specee_depths(self.executor, self.ending, calibration, chunks)
        calibration = replace(calibration, specee_depths=depths)
        write_calibration(calibration, key, folder, self.files)
        partial.remove()
        return CalibrationOutcome(calibration, folder, self.clock() - start_s)

    def certified(self, calibration: Calibration) -> Certificate:
        """Return the existing certificate, or make one and write it."""
        if not self.request.force and (found := self._usable_certificate(calibration)) is not None:
            return found
        key, n_prompts, folder = self.place.key, self.request.n_prompts, self.place.folder
        prompts_of, prompts_identity = self._prompts()
        of = key, calibration.exits_digest, kv_type_of(self.executor), prompts_identity, n_prompts
        partial = self._partial(CERTIFICATE_PARTIAL_SUFFIX, certificate_identity(*of))
        with resumable(partial, folder):
            run = CertificateRun(self.executor, self.ending, calibration, partial, self.clock, self.progress)
            certificate = run.certify(prompts_of, n_prompts, key, self._description)
        write_certificate(certificate, folder, self.files)
        partial.remove()
        return certificate

    def _usable_certificate(self, calibration: Calibration) -> Certificate | None:
        """Return the existing certificate if it can be read and fits this engine's KV type."""
        found = usable(lambda: self.place.certificate(calibration), self.progress, "Certifying")
        return found if found is None or found.kv_type == kv_type_of(self.executor) else None

    def _prompts(self) -> tuple[PromptSource, str]:
        """Return the prompts by group, and a hash of them."""
        request, context_tokens = self.request, self.ending.context_tokens
        if request.texts is None:
            size = prompt_tokens(context_tokens)
            return own_prompts(self._writer(size), self.ending), own_text_identity(self.tokenizer, size, context_tokens)
        prompts = text_prompts(self.tokenizer, request.texts, request.n_prompts, context_tokens, request.n_tokens)
        return by_group(prompts), chunks_identity(prompts)

    def _writer(self, size: int) -> Callable[[int], list[Chunk]]:
        return own_writer(self.executor, self.tokenizer, self.ending, size, self.clock)

    def _partial(self, suffix: str, identity: str) -> PartialCalibration:
        file, settings = self.place.folder.with_name(self.place.folder.name + suffix), self.request.settings
        return PartialCalibration(file, identity, self.files, settings.save_every_s, self.clock)

    @property
    def _description(self) -> str:
        return OWN_TEXT if self.request.texts is None else self.request.description


def _usable(
    place: CalibrationPlace, request: CalibrationRequest, progress: Progress | None
) -> CalibrationOutcome | None:
    """Return a usable existing calibration. A checkpoint's own one doesn't count if the caller gave texts."""

    def find() -> CalibrationOutcome | None:
        is_others = request.texts is not None and place.where() != place.folder
        return None if is_others else found_calibration(place)

    return usable(find, progress)


def usable(find: Callable[[], Found | None], progress: Progress | None, doing: str = "Calibrating") -> Found | None:
    """Return what `find` returns. If a record can't be used, report that it is made again and return None."""
    try:
        return find()
    except StoreError as error:
        if progress:
            progress(f"{doing} again: {error}", 0, 0)
        return None


def require_enough(n_chunks: int) -> None:
    """Check that the model has written enough texts. Raises: ModelError."""
    if n_chunks < MIN_CHUNKS:
        raise ModelError(
            f"this model ends its own texts at once ({n_chunks} of {MIN_CHUNKS} texts needed); "
            "give texts to calibrate on with --text."
        )


@contextmanager
def resumable(partial: PartialCalibration, folder: Path) -> Iterator[None]:
    """Note on an interrupt whether the calibration can be resumed."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interrupt:
        then = "running it again resumes it" if partial.exists else "nothing of its first seconds is kept"
        interrupt.add_note(f"the calibration for {folder} has stopped; {then}.")
        raise
