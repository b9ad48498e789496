"""Chunks of tokens for calibration, from the caller's texts or written by the model itself."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count, zip_longest

import numpy as np

from hetero_ee.calibration.stages import Chunk
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.config import Progress
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import ModelError, UsageError
from hetero_ee.options.engine import CALIBRATION_TOKENS, MIN_CALIBRATION_TOKENS
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.store.record import Arrays

WRITING = "Writing text to calibrate on"
CHUNK_TOKENS = 256
MIN_CHUNK_TOKENS = 8  # shorter ones say little
MIN_CHUNKS = 16  # four for each quarter of the split
CHARACTERS_PER_TOKEN = 16  # more than any text has on average, so the rest is not read
LEAST_PROMPT_TOKENS, MOST_PROMPT_TOKENS = 4, 32  # to certify on
FIRST_PROMPTS_CALL = 10**6  # number of the first call of own_writer to certify on, beyond those of any calibration
N_TOGETHER = 16  # own texts written in one batch
ENOUGH = 0.85  # share of the tokens without which another batch is written: texts that end early make a batch shorter

# Beginnings of the model's own texts: a few words each, of many subjects and forms.
OPENINGS = (
    "Once upon a time",
    "The",
    "In the morning,",
    "The history of the city begins",
    "Question: Why is the sky blue?\nAnswer:",
    "Dear friend,",
    "def main():\n",
    "The recipe needs",
    "One day, a little girl",
    "According to the report,",
    "Step 1:",
    '"I do not know," he said.',
    "The theory of",
    "There was a boy who",
    "List of",
    "She looked out of the window and",
)


def text_chunks(tokenizer: Tokenizer, texts: Sequence[str], n_tokens: int, context_tokens: int) -> list[Chunk]:
    """Return chunks of the texts, in order, with an equal share of the tokens from each text.

    No chunk spans two texts. Each begins with the begin token if the model has one. Short texts give shorter chunks, so
    that there are enough for the split.

    Raises: UsageError: if the texts are too short.
    """
    begin = begin_tokens(tokenizer)
    share = -(-n_tokens // max(1, len(texts)))
    encoded = [
        tokenizer.encode(text[: share * CHARACTERS_PER_TOKEN], with_special_tokens=False)[:share]
        for text in texts
        if text
    ]
    n_found = sum(map(len, encoded))
    if n_found < MIN_CALIBRATION_TOKENS:
        raise UsageError(
            f"the text has {n_found} tokens to calibrate on; at least {MIN_CALIBRATION_TOKENS} are needed, "
            f"and {CALIBRATION_TOKENS} make better metrics."
        )
    size = chunk_tokens(context_tokens, n_found) - len(begin)
    chunks = [(*begin, *ids[first : first + size]) for ids in encoded for first in range(0, len(ids), size)]
    chunks = [chunk for chunk in chunks if len(chunk) >= MIN_CHUNK_TOKENS]
    if len(chunks) < MIN_CHUNKS:
        raise UsageError(
            f"the texts make {len(chunks)} chunks to calibrate on, {MIN_CHUNKS} are needed; give longer ones."
        )
    return chunks


def text_prompts(
    tokenizer: Tokenizer, texts: Sequence[str], n_prompts: int, context_tokens: int, n_fitted: int = 0
) -> list[Chunk]:
    """Return prompts of 4 to 32 tokens for certification: the beginnings of all texts, then their later pieces.

    Args:
        n_fitted: Number of tokens that text_chunks uses. Prompts start after them if enough text is left.

    Raises: UsageError: if the texts are too short.
    """
    begin, size = begin_tokens(tokenizer), prompt_tokens(context_tokens)
    share = -(-n_fitted // max(1, len(texts)))
    most = CHARACTERS_PER_TOKEN * (share + -(-n_prompts // max(1, len(texts))) * size)
    encoded = [tokenizer.encode(text[:most], with_special_tokens=False) for text in texts if text]
    pieces: list[list[int]] = []
    for start in (share, 0):
        of_texts = [[ids[first : first + size] for first in range(start, len(ids), size)] for ids in encoded]
        rounds = zip_longest(*of_texts, fillvalue=[])
        pieces = [piece for each in rounds for piece in each if len(piece) >= MIN_CHUNK_TOKENS]
        if len(pieces) >= n_prompts:
            return [shortened((*begin, *piece), number) for number, piece in enumerate(pieces[:n_prompts])]
    raise UsageError(
        f"the texts make {len(pieces)} prompts to certify on, {n_prompts} are needed; give {n_prompts * size} tokens."
    )


def own_prompts(write: Callable[[int], list[Chunk]], ending: Ending) -> Callable[[int], list[Chunk]]:
    """Return a function that gives groups of prompts, which the model writes with other noise than calibration texts.

    Args:
        write: Function from own_writer, for prompt_tokens tokens.
    """

    def prompts(group: int) -> list[Chunk]:
        texts = write(FIRST_PROMPTS_CALL + group)
        whole = (text[:-1] if text[-1] in ending.eos_token_ids else text for text in texts)
        return [shortened(text, group * N_TOGETHER + number) for number, text in enumerate(whole)]

    return prompts


def prompt_tokens(context_tokens: int) -> int:
    """Return the size of the longest prompt for certification."""
    return min(MOST_PROMPT_TOKENS, context_tokens // 2)


def shortened(tokens: Chunk, number: int) -> Chunk:
    """Cut the tokens to a prompt whose length depends on `number`, so that lengths vary but not between runs."""
    least = min(LEAST_PROMPT_TOKENS, len(tokens))
    return tokens[: int(np.random.default_rng(number).integers(least, len(tokens) + 1))]


def chunk_tokens(context_tokens: int, n_tokens: int) -> int:
    """Return the size of a chunk if the text has n_tokens."""
    return max(MIN_CHUNK_TOKENS + 1, min(CHUNK_TOKENS, context_tokens, n_tokens // MIN_CHUNKS))


def chunks_identity(chunks: Sequence[Chunk]) -> str:
    return hashlib.sha256(json.dumps(chunks).encode()).hexdigest()


def own_text_identity(tokenizer: Tokenizer, n_tokens: int, context_tokens: int) -> str:
    """Return a hash that differs between settings with which one model writes different texts."""
    prompts = [tokenizer.encode(opening) for opening in OPENINGS]
    return hashlib.sha256(json.dumps(["own", prompts, n_tokens, context_tokens]).encode()).hexdigest()


def own_writer(
    executor: Executor, tokenizer: Tokenizer, ending: Ending, size: int, clock: Callable[[], float]
) -> Callable[[int], list[Chunk]]:
    """Return a function that writes N_TOGETHER texts of `size` tokens, greedily in call 0 and sampled in later calls.

    Every call has its own noise. If the model ends every text of a call at once, the call returns an empty list.
    """
    prompts = [ids for opening in OPENINGS if 0 < len(ids := tokenizer.encode(opening)) < size - 1]

    def write(number: int) -> list[Chunk]:
        chosen = [prompts[(number * N_TOGETHER + index) % len(prompts)] for index in range(N_TOGETHER)]
        texts = [list(prompt) for prompt in chosen]
        temperature = 1.0 if number else 0.0
        params = SamplingParams(max_new_tokens=size, temperature=temperature, seed=number)
        limited = Ending(ending.eos_token_ids, size)
        for token in generate(executor, chosen, params, limited, lambda _: "", clock):
            texts[token.sequence].append(token.token_id)
        return [tuple(text) for text in texts if len(text) >= MIN_CHUNK_TOKENS]

    return write if prompts else lambda _: []


def written_chunks(
    write: Callable[[int], Sequence[Chunk]], n_tokens: int, steps: KeptSteps, progress: Progress | None
) -> list[Chunk]:
    """Return up to n_tokens of write(0), write(1), ..., which ends at ENOUGH of them or when a call returns nothing.

    `steps` stores the chunks.

    Raises: ModelError: if the model writes too few tokens.
    """

    def arrays(number: int) -> Arrays:
        found = write(number)
        tokens = np.array([token for chunk in found for token in chunk], np.int64)
        return {"tokens": tokens, "lengths": np.array([*map(len, found)], np.int64)}

    chunks: list[Chunk] = []
    for number in count():
        if (n_written := sum(map(len, chunks))) >= ENOUGH * n_tokens:
            break
        if progress:
            progress(WRITING, n_written, n_tokens)
        found = steps.once(f"text {number}", partial(arrays, number))
        if not len(found["lengths"]):
            break
        parts = np.split(found["tokens"], found["lengths"].cumsum()[:-1])
        chunks += [tuple(part.tolist()) for part in parts]
    if len(chunks) < MIN_CHUNKS:
        raise ModelError(
            f"the model ends its texts at once and wrote {len(chunks)} of the {MIN_CHUNKS} that calibration needs; "
            "give texts to calibrate on with --text."
        )
    n_kept = sum(n <= n_tokens for n in accumulate(map(len, chunks)))
    return chunks[: max(MIN_CHUNKS, n_kept)]


def begin_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer puts before every prompt."""
    with_begin, without = tokenizer.encode("a"), tokenizer.encode("a", with_special_tokens=False)
    n_begin = len(with_begin) - len(without)
    return with_begin[:n_begin] if with_begin[n_begin:] == without else []
