"""Chunks of tokens to calibrate on: from texts, or written by the model itself."""

import hashlib
import json
from collections.abc import Callable, Sequence

from hetero_ee.calibration.stages import Chunk
from hetero_ee.decoding.full import generate
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending
from hetero_ee.errors import UsageError
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.text.tokenizer import Tokenizer

CHUNK_TOKENS = 256
MIN_CHUNK_TOKENS = 8  # shorter ones say little of a text
MIN_CHUNKS = 16  # four for each quarter of the split
MIN_TOKENS = 512
DEFAULT_TOKENS = 8192
CHARACTERS_PER_TOKEN = 16  # more than any text has on average; what lies beyond is not read
N_TOGETHER = 16  # own texts written in one batch

# What own texts begin with: many subjects and forms, a few words each, as the model is to continue by itself.
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
    """Chunks of the texts, an equal share of the tokens from each, in order; none spans two texts.

    Each begins with the begin token where the model has one. A short text gives shorter chunks, so that there are
    enough for a split. Raises UsageError for texts that are too short, with the number of tokens needed.
    """
    begin = begin_tokens(tokenizer)
    share = -(-n_tokens // max(1, len(texts)))
    encoded = [
        tokenizer.encode(text[: share * CHARACTERS_PER_TOKEN], with_special_tokens=False)[:share]
        for text in texts
        if text
    ]
    n_found = sum(map(len, encoded))
    if n_found < MIN_TOKENS:
        raise UsageError(
            f"the text has {n_found} tokens to calibrate on; at least {MIN_TOKENS} are needed, "
            f"and {DEFAULT_TOKENS} make better metrics."
        )
    size = chunk_tokens(context_tokens, n_found) - len(begin)
    chunks = [(*begin, *ids[first : first + size]) for ids in encoded for first in range(0, len(ids), size)]
    chunks = [chunk for chunk in chunks if len(chunk) >= MIN_CHUNK_TOKENS]
    if len(chunks) < MIN_CHUNKS:
        raise UsageError(
            f"the texts make {len(chunks)} chunks to calibrate on, {MIN_CHUNKS} are needed; give longer ones."
        )
    return chunks


def chunk_tokens(context_tokens: int, n_tokens: int) -> int:
    """Size of a chunk where there are n_tokens."""
    return max(MIN_CHUNK_TOKENS + 1, min(CHUNK_TOKENS, context_tokens, n_tokens // MIN_CHUNKS))


def chunks_identity(chunks: Sequence[Chunk]) -> str:
    """Tells the chunks from others."""
    return hashlib.sha256(json.dumps(chunks).encode()).hexdigest()


def own_text_identity(tokenizer: Tokenizer, n_tokens: int, context_tokens: int) -> str:
    """Tells the model's own texts from others of the same model."""
    prompts = [tokenizer.encode(opening) for opening in OPENINGS]
    return hashlib.sha256(json.dumps(["own", prompts, n_tokens, context_tokens]).encode()).hexdigest()


def own_writer(
    executor: Executor, tokenizer: Tokenizer, ending: Ending, n_tokens: int, clock: Callable[[], float]
) -> Callable[[int], list[Chunk]]:
    """A function that writes N_TOGETHER own texts, greedy in call 0 and sampled in all others.

    Every call has noise of its own. One in which the model ends every text at once gives none.
    """
    size = chunk_tokens(ending.context_tokens, n_tokens)
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


def begin_tokens(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before every prompt."""
    with_begin, without = tokenizer.encode("a"), tokenizer.encode("a", with_special_tokens=False)
    n_begin = len(with_begin) - len(without)
    return with_begin[:n_begin] if with_begin[n_begin:] == without else []
