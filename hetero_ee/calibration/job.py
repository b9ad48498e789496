"""Calibrates a model on text, and writes the calibration and its certificate next to the model's store."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hetero_ee.calibration.certificate_file import MAX_PROMPTS, write_certificate
from hetero_ee.calibration.certify import ALGORITHM_VERSION as CERTIFICATE_VERSION
from hetero_ee.calibration.certify import N_PROMPTS, CertificateRun, PromptSource, by_group, kv_type_of, specee_depths
from hetero_ee.calibration.estimate import PROBE_TOKENS, estimated_s
from hetero_ee.calibration.file import write_calibration
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings
from hetero_ee.calibration.stages import Chunk
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.calibration.texts import (
    chunk_tokens,
    chunks_identity,
    own_prompts,
    own_text_identity,
    own_writer,
    prompt_tokens,
    text_chunks,
    text_prompts,
    written_chunks,
)
from hetero_ee.config import Progress
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import ModelError, StoreError, UsageError, shown
from hetero_ee.options.engine import CALIBRATION_TOKENS, TOKENS
from hetero_ee.options.option import is_whole
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import Certificate
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.store.calibration_files import CERTIFICATE_PARTIAL_SUFFIX, PARTIAL_SUFFIX, calibration_file
from hetero_ee.weights.store.filesystem import FileSystem, store_lock

OWN_TEXT = "self-generated text"
LONG_S = 5.0  # expected seconds from which a calibration is announced
WAITING = "Another process is calibrating this model; waiting for it"

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """Text to calibrate on, and the settings of a calibration."""

    texts: Sequence[str] | None = None  # None for texts that the model writes itself
    n_tokens: int = CALIBRATION_TOKENS  # at most
    description: str = "text"  # description of the texts, for people
    settings: CalibrationSettings = field(default_factory=CalibrationSettings)
    force: bool = False  # even if there is a calibration already
    certify: bool = False  # also make a certificate of its exits
    n_prompts: int = N_PROMPTS  # to certify on

    def __post_init__(self) -> None:
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
        """Return the request, or the default one for None, with all changes that are not None. Raises: UsageError."""
        if request is not None and not isinstance(request, cls):
            raise UsageError(f"request is {shown(request)}; expected CalibrationRequest(...).")
        return replace(request or cls(), **{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True, slots=True)
class CalibrationOutcome:
    """A calibration that was either made or found."""

    calibration: Calibration
    folder: Path
    seconds: float  # duration of this run; 0 if the calibration was found
    is_new: bool = True  # False if it was found
    certificate: Certificate | None = None  # if one was requested

    @property
    def date(self) -> str:
        """Day on which the file was written, in ISO 8601."""
        file = calibration_file(self.folder)
        assert file is not None, "it was read or written"
        return date.fromtimestamp(file.stat().st_mtime).isoformat()


def found_calibration(place: CalibrationPlace) -> CalibrationOutcome | None:
    """Return the calibration of the store, or else of its checkpoint. Raises: StoreError: if it can't be used."""
    calibration, folder = place.find(), place.where()
    return None if calibration is None or folder is None else CalibrationOutcome(calibration, folder, 0.0, is_new=False)


@dataclass(frozen=True, slots=True)
class FitText:
    """Text for a fit: the caller's chunks, or a function by which the model writes some. Texts differ in `identity`."""

    identity: str
    n_tokens: int  # at least, if the model writes it
    chunks: Callable[[KeptSteps], list[Chunk]]  # keeps what is written


@dataclass(frozen=True, slots=True)
class CalibrationJob:
    """A call that fits something to a model and stores the result next to the model's store."""

    executor: Executor
    tokenizer: Tokenizer
    ending: Ending
    place: CalibrationPlace
    request: CalibrationRequest
    progress: Progress | None = None
    clock: Callable[[], float] = time.perf_counter
    files: FileSystem = field(default_factory=FileSystem)
    draft: DraftCandidates | None = None  # also fit exits for its candidates
    needs_draft: bool = False  # a calibration without its exits counts as none

    @property
    def description(self) -> str:
        return OWN_TEXT if self.request.texts is None else self.request.description

    def locked(self) -> AbstractContextManager[None]:
        """Lock the store. Only one process calibrates it at a time; others wait and then find its result."""
        waiting = partial(self.progress, WAITING, 0, 0) if self.progress else lambda: None
        return store_lock(self.place.folder, self.files, waiting)

    def usable(self, find: Callable[[], Found | None], doing: str = "Calibrating") -> Found | None:
        """Return what `find` returns, or None if the caller forces a new fit. Reports a result that can't be used."""
        if self.request.force:
            return None
        try:
            return find()
        except StoreError as error:
            if self.progress:
                self.progress(f"{doing} again: {error}", 0, 0)
            return None

    @contextmanager
    def steps(self, suffix: str, *identity: object) -> Iterator[KeptSteps]:
        """Yield the steps of an earlier run of the same identity. Remove them when the block has written its result.

        Args:
            suffix: Suffix of the file in which the steps are stored.
            identity: JSON values that differ between fits with different results.
        """
        file = self.place.folder.with_name(self.place.folder.name + suffix)
        of_model = self.place.key, self.executor.spec.activation_terms
        run = hashlib.sha256(json.dumps([*of_model, *identity]).encode()).hexdigest()
        steps = KeptSteps(file, run, self.files, self.request.settings.save_every_s, self.clock)
        try:
            yield steps
        except (KeyboardInterrupt, SystemExit) as interrupt:
            then = "running it again resumes it" if steps.exists else "nothing of its first seconds is kept"
            interrupt.add_note(f"the calibration for {self.place.folder} has stopped; {then}.")
            raise
        steps.remove()

    def text(self, n_tokens: int) -> FitText:
        """Return up to n_tokens of text for a fit. Raises: UsageError: if the caller's texts are too short."""
        n_tokens, context_tokens = min(n_tokens, self.request.n_tokens), self.ending.context_tokens
        if self.request.texts is not None:
            chunks = text_chunks(self.tokenizer, self.request.texts, n_tokens, context_tokens)
            return FitText(chunks_identity(chunks), sum(map(len, chunks)), lambda steps: chunks)
        write = self.writer(chunk_tokens(context_tokens, n_tokens))
        identity = own_text_identity(self.tokenizer, n_tokens, context_tokens)
        return FitText(identity, n_tokens, lambda steps: written_chunks(write, n_tokens, steps, self.progress))

    def writer(self, size: int) -> Callable[[int], list[Chunk]]:
        """Return a function by which the model writes texts of `size` tokens."""
        return own_writer(self.executor, self.tokenizer, self.ending, size, self.clock)


def calibrate(job: CalibrationJob) -> CalibrationOutcome:
    """Calibrate the model and write the result next to its store, unless a calibration exists already.

    A killed run is resumed.

    Raises:
        UsageError: if the texts are too short.
        ModelError: if the model has one layer, or ends its own texts at once.
        StoreError, DiskFullError: if the calibration can't be written.
    """
    if job.executor.spec.n_layers < 2:
        raise ModelError("a model with one layer has none to exit from; there is nothing to calibrate.")

    def find() -> CalibrationOutcome | None:
        """Return an existing calibration. The checkpoint's own is ignored if the caller gave texts."""
        is_others = job.request.texts is not None and job.place.where() != job.place.folder
        found = None if is_others else found_calibration(job.place)
        draft = job.draft if job.needs_draft else None
        lacks_draft = found is not None and draft is not None and not found.calibration.suits(draft.title)
        return None if lacks_draft else found

    with job.locked():
        outcome = job.usable(find) or _calibrated(job)
        return replace(outcome, certificate=_certified(job, outcome.calibration)) if job.request.certify else outcome


def _calibrated(job: CalibrationJob) -> CalibrationOutcome:
    start_s, settings, folder = job.clock(), job.request.settings, job.place.folder
    text = job.text(job.request.n_tokens)
    draft = job.draft
    with job.steps(PARTIAL_SUFFIX, text.identity, settings.identity, "" if draft is None else draft.title) as steps:
        _announce(job, text.n_tokens, "at most" if steps.exists else "about")
        chunks = text.chunks(steps)
        run = CalibrationRun(job.executor, settings, steps, job.progress, draft)
        calibration = run.calibrate(chunks, job.description)
        depths = specee_depths(job.executor, job.ending, calibration, chunks)
        calibration = replace(calibration, specee_depths=depths)
        if draft is not None and calibration.drafted is not None:
            depths = specee_depths(job.executor, job.ending, calibration, chunks, draft)
            calibration = replace(calibration, drafted=replace(calibration.drafted, depths=depths))
        write_calibration(calibration, job.place.key, folder, job.files)
    return CalibrationOutcome(calibration, folder, job.clock() - start_s)


def _announce(job: CalibrationJob, n_tokens: int, about: str) -> None:
    """Report how long the calibration will take, if that is long. `about` precedes the time."""
    if job.progress is None:
        return
    size = min(PROBE_TOKENS, job.ending.context_tokens)
    write = job.writer(size) if job.request.texts is None else None
    seconds = estimated_s(job.executor, write, n_tokens, job.request.settings, job.clock)
    if seconds >= LONG_S:
        lasting = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
        job.progress(f"Calibrating on {n_tokens:,} tokens of {job.description} takes {about} {lasting}", 0, 0)


def _certified(job: CalibrationJob, calibration: Calibration) -> Certificate:
    """Return the existing certificate if its types are the executor's. Otherwise make one and write it."""
    found = job.usable(lambda: job.place.certificate(calibration), "Certifying")
    kv_type, n_terms = kv_type_of(job.executor), job.executor.spec.activation_terms
    if found is not None and (found.kv_type, found.activation_terms) == (kv_type, n_terms):
        return found
    prompts_of, prompts_identity = _prompts(job)
    key, n_prompts = job.place.key, job.request.n_prompts
    identity = CERTIFICATE_VERSION, calibration.exits_digest, kv_type, prompts_identity, n_prompts
    with job.steps(CERTIFICATE_PARTIAL_SUFFIX, *identity) as steps:
        run = CertificateRun(job.executor, job.ending, calibration, steps, job.clock, job.progress)
        certificate = run.certify(prompts_of, n_prompts, key, job.description)
        write_certificate(certificate, job.place.folder, job.files)
    return certificate


def _prompts(job: CalibrationJob) -> tuple[PromptSource, str]:
    """Return the prompts for certification in groups, and a hash of them."""
    request, context_tokens = job.request, job.ending.context_tokens
    if request.texts is None:
        size = prompt_tokens(context_tokens)
        return own_prompts(job.writer(size), job.ending), own_text_identity(job.tokenizer, size, context_tokens)
    prompts = text_prompts(job.tokenizer, request.texts, request.n_prompts, context_tokens, request.n_tokens)
    return by_group(prompts), chunks_identity(prompts)
