"""What the latest call's text moved and used: an executor's counters, from where that text began."""

from collections import Counter
from dataclasses import replace

from hetero_ee.runtime.devices.traffic import TextTraffic
from hetero_ee.runtime.executors.executor import Executor


class TextMeter:
    """Reads the counters of an executor, which it does not keep, at each token."""

    def __init__(self, executor: Executor) -> None:
        self._moved_before, self._n_tokens = Counter[str](), 0
        self._neurons_before = replace(executor.neurons)

    def begin(self, executor: Executor, n_sequences: int) -> None:
        """Start counting for so many new sequences."""
        self._neurons_before, self._n_tokens = replace(executor.neurons), -n_sequences

    def count(self, executor: Executor) -> None:
        """Count a token. Each sequence's first token comes from its prompt: counting starts after those."""
        self._n_tokens, traffic = self._n_tokens + 1, executor.traffic
        if self._n_tokens <= 0 and traffic is not None:
            self._moved_before = Counter(traffic.n_bytes)

    def traffic(self, executor: Executor) -> TextTraffic | None:
        """None where the executor counts none."""
        counted = executor.traffic
        return None if counted is None else TextTraffic(counted.n_bytes - self._moved_before, max(0, self._n_tokens))

    def neuron_shares(self, executor: Executor) -> tuple[float, float] | None:
        """Of the FFN neurons, what generated tokens used on average, and what a predictor let be computed for them, 0
        without one; None where FFNs are dense."""
        return executor.neurons.since(self._neurons_before)
