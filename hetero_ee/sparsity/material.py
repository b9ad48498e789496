"""Text for fits of neurons, from the caller or written by the model, and the saved steps of a fit."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hetero_ee.calibration.job import OWN_TEXT, CalibrationRequest, require_enough, resumable
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.calibration.partial import KeptSteps, PartialCalibration
from hetero_ee.calibration.stages import Chunk
from hetero_ee.calibration.texts import (
    chunk_tokens,
    chunks_identity,
    own_text_identity,
    own_writer,
    text_chunks,
    written_chunks,
)
from hetero_ee.config import Progress
from hetero_ee.decoding.requests import Ending
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.store.calibration_files import PARTIAL_SUFFIX
from hetero_ee.weights.store.filesystem import FileSystem


@dataclass(frozen=True, slots=True)
class Material:
    """Up to most_tokens of text for a fit. executor: writes the text if the request has none."""

    executor: Executor
    tokenizer: Tokenizer
    ending: Ending
    request: CalibrationRequest
    most_tokens: int
    progress: Progress | None
    clock: Callable[[], float]

    @property
    def description(self) -> str:
        return OWN_TEXT if self.request.texts is None else self.request.description

    @contextmanager
    def keeping(self, place: CalibrationPlace, suffix: str, fit: object) -> Iterator[tuple[list[Chunk], KeptSteps]]:
        """Yield the chunks and the steps that an earlier run of the same fit has saved next to the store.

        Args:
            place: Of the store.
            suffix: Of the file that the steps are saved in.
            fit: JSON value that differs between fits with other numbers.

        Raises:
            UsageError: The texts are too short.
            ModelError: The model writes no text.
            StoreError: The steps can't be saved.
        """
        given = self._given()
        identity = chunks_identity(given) if given else own_text_identity(self.tokenizer, *self._sizes)
        run = hashlib.sha256(json.dumps([place.key, identity, fit]).encode()).hexdigest()
        file = place.folder.with_name(place.folder.name + suffix + PARTIAL_SUFFIX)
        partial = PartialCalibration(file, run, FileSystem(), self.request.settings.save_every_s, self.clock)
        with resumable(partial, place.folder):
            kept = KeptSteps(partial)
            yield given or self._written(kept), kept

    @property
    def _sizes(self) -> tuple[int, int]:
        """Total tokens, and tokens of a context."""
        return min(self.request.n_tokens, self.most_tokens), self.ending.context_tokens

    def _given(self) -> list[Chunk] | None:
        texts = self.request.texts
        return None if texts is None else text_chunks(self.tokenizer, texts, *self._sizes)

    def _written(self, kept: KeptSteps) -> list[Chunk]:
        n_tokens, context_tokens = self._sizes
        size = chunk_tokens(context_tokens, n_tokens)
        write = own_writer(self.executor, self.tokenizer, self.ending, size, self.clock)
        chunks = written_chunks(write, n_tokens, kept, self.progress)
        require_enough(len(chunks))
        return chunks
