"""What the full model says of a text that is there already: the logits after each of its tokens."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor


def score(executor: Executor, token_ids: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """Yields after each token its logits (vocab,) and the layers it has passed: all. The text has its own sequence."""
    sequence, size = executor.cache.open_new(), executor.prompt_chunk_tokens
    try:
        for first in range(0, len(token_ids), size):
            chunk = token_ids[first : first + size]
            for logits in executor.logits(Batch.of_sequence(sequence, first, chunk), range(len(chunk))):
                yield logits, executor.spec.n_layers
    finally:
        executor.cache.close(sequence)
