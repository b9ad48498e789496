"""Counts the bytes moved and neurons used by the latest call, from an executor's running totals."""

from collections import Counter
from dataclasses import replace

from hetero_ee.runtime.devices.traffic import TextTraffic
from hetero_ee.runtime.executors.executor import Executor


class TextMeter:
    """Counts bytes and neurons of a call's tokens. It keeps no reference to the executor."""

    def __init__(self, executor: Executor) -> None:
        self._moved_before, self._n_tokens = Counter[str](), 0
        self._neurons_before = replace(executor.neurons)

    def begin(self, executor: Executor, n_sequences: int) -> None:
        self._neurons_before, self._n_tokens = replace(executor.neurons), -n_sequences

    def count(self, executor: Executor) -> None:
        """Count one token. Counting starts after each sequence's first token, which prefill produces."""
        self._n_tokens, traffic = self._n_tokens + 1, executor.traffic
        if self._n_tokens <= 0 and traffic is not None:
            self._moved_before = Counter(traffic.n_bytes)

    def traffic(self, executor: Executor) -> TextTraffic | None:
        """Return the bytes moved, or None if the executor doesn't count them."""
        counted = executor.traffic
        return None if counted is None else TextTraffic(counted.n_bytes - self._moved_before, max(0, self._n_tokens))

    def neuron_shares(self, executor: Executor) -> tuple[float, float] | None:
        """Return the average shares of FFN neurons that tokens used and that a predictor selected; None for dense FFNs.

        Without a predictor the second share is 0.
        """
        return executor.neurons.since(self._neurons_before)
