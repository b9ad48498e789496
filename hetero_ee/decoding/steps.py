"""Texts that join and leave while others run, as a server has them: what a step of all of them is."""

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.decoding.texts import Continuation, Text
from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Observe

Take = Callable[[], Sequence[GeneratedToken]]  # one text's part of a pass; raises the HeteroError that ends it alone
Generate = Callable[[Continuation, SamplingParams, threading.Event], Generator[GeneratedToken]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step brought to one text: a token, or the error that ended it."""

    number: int  # the text's, as join() gave it
    outcome: GeneratedToken | HeteroError

    @property
    def is_last(self) -> bool:
        return isinstance(self.outcome, HeteroError) or self.outcome.finish_reason is not None


class Steps(Protocol):
    """Each text's tokens are those that it has alone, whoever runs beside it. For one thread.

    A text that ended, with its last token or an error, has left; its sequence of the KV cache stays open.
    """

    def join(self, prompt: Continuation, params: SamplingParams, stop: threading.Event) -> int:
        """Its number; its first token comes from a later step. stop: ends it, even while its prompt is read.

        Raises UsageError for a prompt that the context has no room for.
        """
        ...

    def leave(self, number: int) -> None:
        """Ends the text where it is."""
        ...

    def step(self) -> Sequence[Stepped]:
        """Some progress of every text. What is no error of one text alone is raised."""
        ...


class SharedPasses(Protocol):
    """What brings texts their tokens where they share passes. observe: told each chunk of a prompt."""

    observe: Observe | None

    def begin(self, text: Text) -> None:
        """Its prompt is about to be read; the cache holds the part that is not."""
        ...

    def run(self, texts: Sequence[Text]) -> Sequence[Take]:
        """One pass with the last token of every text: what each takes of it, in the same order."""
        ...

    def leave(self, texts: Sequence[Text]) -> None:
        """No token of these texts follows, or their last pass is to be forgotten."""
        ...


class AlternatingSteps:
    """Texts that take turns: a step is a token of each, none of them in one pass with another's."""

    def __init__(self, generate: Generate) -> None:
        self._generate, self._next_number = generate, 0
        self._texts: dict[int, Generator[GeneratedToken]] = {}

    def join(self, prompt: Continuation, params: SamplingParams, stop: threading.Event) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        self._texts[number] = self._generate(prompt, params, stop)
        return number

    def leave(self, number: int) -> None:
        tokens = self._texts.pop(number, None)
        if tokens is not None:
            tokens.close()

    def step(self) -> Sequence[Stepped]:
        stepped = [Stepped(number, _next(tokens)) for number, tokens in self._texts.items()]
        for each in stepped:
            if each.is_last:
                self.leave(each.number)
        return stepped


def _next(tokens: Generator[GeneratedToken]) -> GeneratedToken | HeteroError:
    """A last token comes after whatever is looked at behind the text."""
    try:
        token = next(tokens)
        if token.finish_reason is not None:
            next(tokens, None)
        return token
    except HeteroError as error:
        return error
