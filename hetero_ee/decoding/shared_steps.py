"""Texts that share passes: each joins and leaves between two of them (continuous batching).

A token's bits depend on its own sequence alone, so that each text is the one it is alone, whoever runs beside it.
Source: iteration-level scheduling, Orca (OSDI 2022).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.decoding.steps import SharedPasses, Stepped, Take
from hetero_ee.decoding.texts import Continuation, Ending, Text, last_tokens, prefill, prompt_chunks, step, texts_of
from hetero_ee.decoding.turns import Turns
from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor, Observe
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


class FullPasses:
    """See SharedPasses: a token of each text, by all layers."""

    observe: Observe | None = None

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        self._executor, self._clock = executor, clock

    def begin(self, text: Text) -> None:
        pass

    def run(self, texts: Sequence[Text]) -> list[Take]:
        logits = self._executor.logits(last_tokens(texts), range(len(texts)))
        return [partial(self._taken, text, row) for text, row in zip(texts, logits, strict=True)]

    def leave(self, texts: Sequence[Text]) -> None:
        pass

    def _taken(self, text: Text, logits: Tensor) -> list[GeneratedToken]:
        return [step(text, logits, self._clock())]


class SharedSteps:
    """See Steps. A step is a chunk of one prompt, then a pass with every text whose prompt is read."""

    def __init__(
        self,
        executor: Executor,
        passes: SharedPasses,
        ending: Callable[[], Ending],
        decode: Decode,
        clock: Callable[[], float],
        turns: Turns,
        look: Callable[[], None],
    ) -> None:
        """look: before each text and behind it; raises HeteroError where the weights are no longer what they were."""
        self._executor, self._passes, self._ending = executor, passes, ending
        self._decode, self._clock, self._turns, self._look = decode, clock, turns, look
        self._texts: dict[int, _Running] = {}
        self._next_number = 0

    def join(self, prompt: Continuation, params: SamplingParams, stop: threading.Event) -> int:
        self._look()
        common = params, self._decode, self._ending(), self._clock()
        (text,) = self._turns.alone(lambda: texts_of(prompt, *common))  # the context may grow
        self._passes.begin(text)
        number, self._next_number = self._next_number, self._next_number + 1
        self._texts[number] = _Running(number, text, stop)
        return number

    def leave(self, number: int) -> None:
        running = self._texts.pop(number, None)
        if running is not None:
            self._passes.leave([running.text])

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
        text, executor, observe = running.text, self._executor, self._passes.observe
        try:
            if len(self._texts) == 1:  # the executor lets chunks overlap
                logits = prefill(executor, text, observe)
            else:
                n_read = executor.cache.length(text.cached_as)
                executor.make_room({text.cached_as: text.n_prompt_tokens})
                chunk = next(prompt_chunks(executor, text, n_read))
                logits = executor.prompt([chunk], observe)
                if n_read + len(chunk) < text.n_prompt_tokens:
                    return []
        except HeteroError as error:
            return [Stepped(running.number, error)]
        return self._taken(running, lambda: [step(text, logits, self._clock())])

    def _decoded(self, decoding: Sequence[_Running]) -> list[Stepped]:
        """Tokens of each. A pass that fails is repeated with every text alone, so that it ends no other."""
        texts = [each.text for each in decoding]
        try:
            takes = self._passes.run(texts)
        except HeteroError as error:
            if len(decoding) == 1:
                return [Stepped(decoding[0].number, error)]
            self._passes.leave(texts)
            for text in texts:
                self._executor.cache.cut(text.cached_as, len(text.token_ids) - 1)
            return [stepped for each in decoding for stepped in self._decoded([each])]
        return [stepped for each, take in zip(decoding, takes, strict=True) for stepped in self._taken(each, take)]

    def _taken(self, running: _Running, take: Take) -> list[Stepped]:
        """What its part of a pass brings one text."""
        try:
            tokens = take()
            if tokens[-1].finish_reason is not None:
                self._look()
        except HeteroError as error:
            return [Stepped(running.number, error)]
        return [Stepped(running.number, token) for token in tokens]
