"""Token ids of texts to measure or calibrate on: windows of a given text, or texts that a model writes itself."""

import time
from collections.abc import Sequence
from pathlib import Path

from hetero_ee.calibration.stages import Chunk
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.calibration.texts import CHARACTERS_PER_TOKEN, begin_tokens, own_writer, written_chunks
from hetero_ee.config import Progress
from hetero_ee.decoding.generation_defaults import GenerationDefaults
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.runtime.opening import open_on_cpu
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.model_weights import as_stored
from hetero_ee.weights.store.reader import open_store

SEPARATOR = "<|endoftext|>"  # between documents of one file, as the TinyStories files have it
WINDOW_TOKENS = 256
LEAST_WINDOW_TOKENS = 8  # shorter ones say little
LEAST_WINDOWS = 16  # for intervals


def text_windows(tokenizer: Tokenizer, texts: Sequence[str], n_tokens: int, size: int = WINDOW_TOKENS) -> list[Chunk]:
    """Cut an equal share of each text, n_tokens in all, into windows of at most `size` tokens, document by document.

    Each window begins with the begin token if the model has one.

    Raises: UsageError: if the texts have fewer than two windows.
    """
    begin, windows, n_found = begin_tokens(tokenizer), list[Chunk](), 0
    size = min(size, max(2 * LEAST_WINDOW_TOKENS, n_tokens // LEAST_WINDOWS))
    share, step = -(-n_tokens // max(1, len(texts))), size - len(begin)
    for text in texts:
        n_left = share
        for document in text[: CHARACTERS_PER_TOKEN * share].split(SEPARATOR):
            ids = tokenizer.encode(document.strip(), with_special_tokens=False)[:n_left] if n_left > 0 else []
            n_left -= len(ids)
            n_found += len(ids)
            windows += [(*begin, *ids[first : first + step]) for first in range(0, len(ids), step)]
    windows = [window for window in windows if len(window) >= LEAST_WINDOW_TOKENS]
    if len(windows) < 2:
        raise UsageError(f"the text has too few tokens ({n_found}); give one of at least {2 * size}.")
    return windows


def distinct_share(windows: Sequence[Chunk], n: int = 8) -> float:
    """Return the share of the windows' runs of n tokens that differ from all others."""
    runs = [tuple(window[first : first + n]) for window in windows for first in range(len(window) - n + 1)]
    return len(set(runs)) / max(1, len(runs))


def own_windows(
    store: Path, n_tokens: int, threads: int, progress: Progress | None, size: int = WINDOW_TOKENS
) -> list[Chunk]:
    """Return texts that a store's model writes after short openings of many kinds, the same ones every time.

    Raises: ModelError: if the model ends its texts at once.
    """
    spec = read_spec(store)
    weights, tokenizer = open_store(store, spec), Tokenizer.load(store, spec.vocab_size)
    size = min(size, spec.max_context_tokens)
    executor = open_on_cpu(as_stored(spec, weights), weights, size, threads, progress)
    try:
        ending = Ending(GenerationDefaults.read(store).eos_token_ids(tokenizer), size)
        write = own_writer(executor, tokenizer, ending, size, time.perf_counter)
        return written_chunks(write, n_tokens, KeptSteps(), progress)
    finally:
        executor.close()
