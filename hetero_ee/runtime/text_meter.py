"""What the latest call's text moved and used: an executor's counters, from where that text began."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from hetero_ee.runtime.devices.traffic import TextTraffic
from hetero_ee.runtime.executors.executor import Executor

Token = TypeVar("Token")


class TextMeter:
    """Reads the counters of an executor, which it does not keep, while tokens pass."""

    def __init__(self, executor: Executor) -> None:
        self._moved_before, self._n_tokens = Counter[str](), 0
        self._neurons_before = replace(executor.neurons)

    def metered(self, executor: Executor, tokens: Iterator[Token], n_texts: int) -> Iterator[Token]:
        """The same tokens. The texts' first ones are their prompts': what is moved is counted from there on."""
        self._neurons_before = replace(executor.neurons)
        for n_tokens, token in enumerate(tokens, 1 - n_texts):
            self._n_tokens, traffic = n_tokens, executor.traffic
            if n_tokens <= 0 and traffic is not None:
                self._moved_before = Counter(traffic.n_bytes)
            yield token

    def traffic(self, executor: Executor) -> TextTraffic | None:
        """None where the executor counts none."""
        counted = executor.traffic
        return None if counted is None else TextTraffic(counted.n_bytes - self._moved_before, self._n_tokens)

    def neuron_shares(self, executor: Executor) -> tuple[float, float] | None:
        """Of the FFN neurons, what generated tokens used on average, and what a predictor let be computed for them, 0
        without one; None where FFNs are dense."""
        return executor.neurons.since(self._neurons_before)
