"""Timed runs as llama-bench makes them: a prompt of n tokens, n tokens one after another, each behind a given depth."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev

from hetero_ee.runtime.executor import Executor
from hetero_ee.runtime.rows import Rows

FIRST_TOKEN_ID = 1


@dataclass(frozen=True, slots=True)
class BenchRun:
    """n_prompt tokens in one go, or n_gen one by one, behind n_depth others. samples_s: seconds of each repetition."""

    n_prompt: int
    n_gen: int
    n_depth: int
    samples_s: tuple[float, ...]

    @property
    def name(self) -> str:
        """As llama-bench calls it: pp512, tg128, with @ d1024 behind that many tokens."""
        test = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{test} @ d{self.n_depth}" if self.n_depth else test

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple((self.n_prompt or self.n_gen) / seconds for seconds in self.samples_s)

    @property
    def avg_ts(self) -> float:
        return fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return stdev(self.samples_ts) if len(self.samples_s) > 1 else 0.0


def bench_run(
    executor: Executor,
    n_prompt: int,
    n_gen: int,
    n_depth: int,
    *,
    chunk_tokens: int,
    repetitions: int,
    clock: Callable[[], float],
) -> BenchRun:
    """One of n_prompt and n_gen is 0. The depth is filled before the clock starts; one run before the first is not
    counted. Tokens are those the model would choose greedily; tokenization is left out.
    """
    samples = []
    for repetition in range(repetitions + 1):
        sequence = executor.cache.open_new()
        try:
            _prefill(executor, sequence, 0, n_depth, chunk_tokens)
            _make_room(executor, sequence, n_depth, n_prompt + n_gen)
            start_s = clock()
            if n_prompt:
                _prefill(executor, sequence, n_depth, n_prompt, chunk_tokens)
            else:
                _decode(executor, sequence, n_depth, n_gen)
            elapsed_s = clock() - start_s
        finally:
            executor.cache.close(sequence)
        if repetition:
            samples.append(elapsed_s)
    return BenchRun(n_prompt, n_gen, n_depth, tuple(samples))


def _make_room(executor: Executor, sequence: int, length: int, n_tokens: int) -> None:
    """So that the cache does not grow while the clock runs: it doubles, which a short run pays for a long text."""
    executor.cache.admit(Rows.of_sequence(sequence, length, [FIRST_TOKEN_ID] * n_tokens))
    executor.cache.truncate(sequence, length)


def _prefill(executor: Executor, sequence: int, first: int, n_tokens: int, chunk_tokens: int) -> None:
    for start in range(first, first + n_tokens, chunk_tokens):
        ids = [FIRST_TOKEN_ID] * min(chunk_tokens, first + n_tokens - start)
        hidden = executor.hidden(Rows.of_sequence(sequence, start, ids))
    if n_tokens:
        executor.head(hidden[-1:])


def _decode(executor: Executor, sequence: int, first: int, n_tokens: int) -> None:
    token_id = FIRST_TOKEN_ID
    for position in range(first, first + n_tokens):
        logits = executor.logits(Rows((token_id,), (sequence,), (position,)), (0,))
        token_id = int(logits[0].argmax())
