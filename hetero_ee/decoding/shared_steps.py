"""Texts that share passes at full depth: each joins and leaves between two of them (continuous batching).

A token's bits depend on its own sequence alone, so that each text is what full.py makes of it, whoever runs beside it.
Source: iteration-level scheduling, Orca (OSDI 2022).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.steps import Stepped
from hetero_ee.decoding.texts import Continuation, Ending, Text, last_tokens, prefill, prompt_chunks, step, texts_of
from hetero_ee.decoding.turns import Turns
from hetero_ee.errors import HeteroError
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.text.text_stream import Decode


@dataclass(slots=True, eq=False)
class _Running:
    """A text and what is its own."""

    number: int
    text: Text
    stop: threading.Event

    @property
    def is_read(self) -> bool:
        """Whether its prompt has led to a token."""
        return len(self.text.token_ids) > self.text.n_prompt_tokens


class SharedSteps:
    """See Steps. A step is a chunk of one prompt, then a token of every text whose prompt is read, in one pass."""

    def __init__(
        self,
        executor: Executor,
        ending: Callable[[], Ending],
        decode: Decode,
        clock: Callable[[], float],
        turns: Turns,
        look: Callable[[], None],
    ) -> None:
        """look: before each text and behind it; raises HeteroError where the weights are no longer what they were."""
        self._executor, self._ending, self._decode, self._clock = executor, ending, decode, clock
        self._turns, self._look = turns, look
        self._texts: dict[int, _Running] = {}
        self._next_number = 0

    def join(self, prompt: Continuation, params: SamplingParams, stop: threading.Event) -> int:
        self._look()
        common = params, self._decode, self._ending(), self._clock()
        (text,) = self._turns.alone(lambda: texts_of(prompt, *common))  # the context may grow
        number, self._next_number = self._next_number, self._next_number + 1
        self._texts[number] = _Running(number, text, stop)
        return number

    def leave(self, number: int) -> None:
        self._texts.pop(number, None)

    def step(self) -> Sequence[Stepped]:
        decoding = [each for each in self._texts.values() if each.is_read]
        stepped: list[Stepped] = []
        reading = next((each for each in self._texts.values() if not each.is_read), None)
        if reading is not None:
            stepped += self._turns.alone(lambda: self._read(reading), reading.stop)
        if decoding:
            stepped += self._turns.alone(lambda: self._decoded(decoding))
        for each in stepped:
            if each.is_last:
                self.leave(each.number)
        return stepped

    def _read(self, running: _Running) -> list[Stepped]:
        """A chunk of the prompt, so that others wait for no more; all of it where there are none."""
        text, executor = running.text, self._executor
        try:
            if len(self._texts) == 1:  # the executor lets chunks overlap
                return [self._taken(running, prefill(executor, text))]
            n_read = executor.cache.length(text.cached_as)
            executor.make_room({text.cached_as: text.n_prompt_tokens})
            chunk = next(prompt_chunks(executor, text, n_read))
            logits = executor.prompt([chunk])
            is_whole = n_read + len(chunk) == text.n_prompt_tokens
            return [self._taken(running, logits)] if is_whole else []
        except HeteroError as error:
            return [Stepped(running.number, error)]

    def _decoded(self, decoding: Sequence[_Running]) -> list[Stepped]:
        """A token of each. A pass that fails is repeated with every text alone, so that it ends no other."""
        executor, texts = self._executor, [each.text for each in decoding]
        try:
            logits = executor.logits(last_tokens(texts), range(len(texts)))
        except HeteroError as error:
            if len(decoding) == 1:
                return [Stepped(decoding[0].number, error)]
            for text in texts:
                executor.cache.cut(text.cached_as, len(text.token_ids) - 1)
            return [stepped for each in decoding for stepped in self._decoded([each])]
        return [self._taken(each, row) for each, row in zip(decoding, logits, strict=True)]

    def _taken(self, running: _Running, logits: Tensor) -> Stepped:
        """What follows by these logits (vocab,)."""
        try:
            outcome: GeneratedToken | HeteroError = step(running.text, logits, self._clock())
            if isinstance(outcome, GeneratedToken) and outcome.finish_reason is not None:
                self._look()
        except HeteroError as error:
            outcome = error
        return Stepped(running.number, outcome)
