"""What the full model says of a text that is there already."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor


def score(executor: Executor, token_ids: Sequence[int], n_prompt_tokens: int) -> Iterator[tuple[Tensor, int]]:
    """What this text's tokens after its prompt would have been chosen from: logits (vocab,) and the layers passed, all
    of them, for each. The text has a sequence of its own."""
    sequence, size = executor.cache.open_new(), executor.prompt_chunk_tokens
    try:
        for first in range(0, len(token_ids) - 1, size):
            chunk = list(token_ids[first : min(first + size, len(token_ids) - 1)])
            hidden = executor.hidden(Batch.of_sequence(sequence, first, chunk))
            wanted = hidden[max(0, n_prompt_tokens - 1 - first) :]
            for logits in executor.to_logits(wanted) if len(wanted) else ():
                yield logits, executor.spec.n_layers
    finally:
        executor.cache.close(sequence)


def n_changed(executor: Executor, token_ids: Sequence[int], n_prompt_tokens: int) -> int:
    """Of this text's tokens after its prompt, those that the full model would not have chosen there, greedily."""
    said = (int(logits.argmax()) for logits, _ in score(executor, token_ids, n_prompt_tokens))
    return sum(token_id != each for token_id, each in zip(token_ids[n_prompt_tokens:], said, strict=True))
