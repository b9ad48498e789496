"""Scores given tokens: the full model's logits and log-probabilities for them."""

from collections.abc import Generator, Iterator, Sequence

from torch import Tensor

from hetero_ee.decoding.logprobs import TokenLogprobs, token_logprobs
from hetero_ee.decoding.requests import Continuation, Ending, require_room
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.executor import Executor

SCORED_TOKENS = 128  # in one pass with other sequences: their logits, a vocabulary each, are memory that no plan counts


def score(executor: Executor, token_ids: Sequence[int], n_prompt_tokens: int) -> Iterator[tuple[Tensor, int]]:
    """Yield, for each token after the prompt, the logits (vocab,) that predict it and the layers passed (all)."""
    sequence = executor.cache.open_new()
    try:
        for rows in _logits(executor, sequence, token_ids, n_prompt_tokens, executor.prompt_chunk_tokens):
            for logits in rows:
                yield logits, executor.spec.n_layers
    finally:
        executor.cache.close(sequence)


def prompt_logprobs(
    executor: Executor, prompt: Continuation, n_top: int, ending: Ending
) -> Generator[list[TokenLogprobs]]:
    """Yield the log-probabilities of a prompt's tokens except the first, several per pass.

    The sequence of the KV cache must be empty, and then holds all tokens except the last.

    Raises: UsageError: if the context is too small.
    """
    token_ids, n_done = prompt.token_ids, 1
    require_room(len(token_ids), ending)
    executor.make_room({prompt.kv_sequence: len(token_ids)})
    size = min(executor.prompt_chunk_tokens, SCORED_TOKENS)
    for rows in _logits(executor, prompt.kv_sequence, token_ids, 1, size):
        said = token_ids[n_done : n_done + len(rows)]
        n_done += len(said)
        yield [token_logprobs(logits, token_id, n_top) for logits, token_id in zip(rows, said, strict=True)]


def n_changed(executor: Executor, token_ids: Sequence[int], n_prompt_tokens: int) -> int:
    """Return the number of tokens after the prompt that differ from the full model's greedy choice."""
    said = (int(logits.argmax()) for logits, _ in score(executor, token_ids, n_prompt_tokens))
    return sum(token_id != each for token_id, each in zip(token_ids[n_prompt_tokens:], said, strict=True))


def _logits(
    executor: Executor, sequence: int, token_ids: Sequence[int], n_prompt_tokens: int, size: int
) -> Iterator[Tensor]:
    """Yield logits (m, vocab) that predict the tokens after the prompt, in passes of at most `size` tokens."""
    for first in range(0, len(token_ids) - 1, size):
        chunk = list(token_ids[first : min(first + size, len(token_ids) - 1)])
        wanted = executor.hidden(Batch.of_sequence(sequence, first, chunk))[max(0, n_prompt_tokens - 1 - first) :]
        if len(wanted):
            yield executor.to_logits(wanted)
