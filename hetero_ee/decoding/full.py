"""Full-depth decoding: every token passes every layer. The reference for all other ways to decode."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from hetero_ee.decoding.result import FinishReason, GeneratedToken
from hetero_ee.decoding.sampling import SamplingParams, choose_token
from hetero_ee.decoding.text import Decode, TextStream
from hetero_ee.runtime.executor import Executor
from hetero_ee.runtime.rows import Rows

UNCACHED = -1  # no sequence of the KV cache has this number
PREFILL_CHUNK_TOKENS = 256  # bounds the memory of a long prompt's pass; Ctrl-C is answered between chunks


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends a text beside its sampling parameters. context_tokens: prompt and text together."""

    eos_token_ids: frozenset[int]
    context_tokens: int


@dataclass(slots=True)
class _Text:
    """One sequence being generated: the prompt's index in its list, token_ids of prompt and text so far.

    cached_as: its number in the KV cache, other than `sequence` where texts of another call are being generated too.
    """

    sequence: int
    token_ids: list[int]
    n_prompt_tokens: int
    stream: TextStream
    cached_as: int = UNCACHED
    finished: bool = False


def generate(
    executor: Executor,
    prompts: list[list[int]],
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
) -> Iterator[GeneratedToken]:
    """Yields the tokens of all prompts as they come. Closing the iterator frees the sequences' memory."""
    start_s = clock()
    texts = [
        _Text(sequence, list(ids), len(ids), TextStream(decode, ids, params.stop))
        for sequence, ids in enumerate(prompts)
    ]
    try:
        for text in texts:
            text.cached_as = executor.cache.open_new()
        for token in _tokens(executor, texts, params, ending, lambda: clock() - start_s):
            if token.finish_reason is not None:  # its memory is free for others at once
                executor.cache.close(texts[token.sequence].cached_as)
                texts[token.sequence].cached_as = UNCACHED
            yield token
    finally:
        for text in texts:
            executor.cache.close(text.cached_as)


def generate_from(
    executor: Executor,
    sequence: int,
    prompt_ids: list[int],
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
) -> Iterator[GeneratedToken]:
    """Yields what generate yields for this one prompt, whose first tokens lie in the KV cache already.

    sequence: its number there. It holds fewer tokens than the prompt, stays open, and at each token holds every token
    before it; after a pass that failed it may hold more, which are not to be trusted.
    """
    start_s = clock()
    stream = TextStream(decode, prompt_ids, params.stop)
    text = _Text(0, list(prompt_ids), len(prompt_ids), stream, cached_as=sequence)
    yield from _tokens(executor, [text], params, ending, lambda: clock() - start_s)


def _tokens(
    executor: Executor,
    texts: list[_Text],
    params: SamplingParams,
    ending: Ending,
    elapsed_s: Callable[[], float],
) -> Iterator[GeneratedToken]:
    """The loop: the rest of each prompt, then a token of every unfinished text a pass."""
    logits_of = {text.sequence: _prefill(executor, text) for text in texts}
    while logits_of:
        for sequence, logits in logits_of.items():
            yield _step(texts[sequence], logits, params, ending, elapsed_s())
        active = [text for text in texts if not text.finished]
        logits_of = _decode_step(executor, active) if active else {}


def _prefill(executor: Executor, text: _Text) -> Tensor:
    """Runs what the cache lacks of the prompt, in chunks; logits (vocab,) of its last token."""
    for first in range(executor.cache.length(text.cached_as), text.n_prompt_tokens, PREFILL_CHUNK_TOKENS):
        chunk = text.token_ids[first : min(first + PREFILL_CHUNK_TOKENS, text.n_prompt_tokens)]
        hidden = executor.hidden(Rows.of_sequence(text.cached_as, first, chunk))
    return executor.head(hidden[-1:])[0]


def _decode_step(executor: Executor, active: list[_Text]) -> dict[int, Tensor]:
    """One pass with the last token of every active sequence; sequence -> logits (vocab,)."""
    rows = Rows(
        tuple(text.token_ids[-1] for text in active),
        tuple(text.cached_as for text in active),
        tuple(len(text.token_ids) - 1 for text in active),
    )
    logits = executor.logits(rows, range(len(active)))
    return {text.sequence: logits[row] for row, text in enumerate(active)}


def _step(text: _Text, logits: Tensor, params: SamplingParams, ending: Ending, elapsed_s: float) -> GeneratedToken:
    """Chooses one sequence's next token and decides whether its text ends there."""
    position = len(text.token_ids)
    token_id = choose_token(logits, text.token_ids, params, text.sequence, position)
    text.token_ids.append(token_id)
    is_end = token_id in params.stop_token_ids or (token_id in ending.eos_token_ids and not params.ignore_eos)
    piece = "" if is_end else text.stream.add(token_id)
    reason = _finish_reason(text, is_end, params, ending)
    if reason is not None:
        text.finished = True
        piece += text.stream.finish()
    return GeneratedToken(piece, token_id, text.sequence, position, reason, elapsed_s)


def _finish_reason(text: _Text, is_end: bool, params: SamplingParams, ending: Ending) -> FinishReason | None:
    if is_end or text.stream.stopped:
        return FinishReason.STOP
    if len(text.token_ids) - text.n_prompt_tokens == params.max_new_tokens:
        return FinishReason.LENGTH
    if len(text.token_ids) >= ending.context_tokens:
        return FinishReason.CONTEXT
    return None
