"""The texts being generated: how each begins, takes a token and ends. All that the ways to decode share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from torch import Tensor

from hetero_ee.config import READING, Progress
from hetero_ee.decoding.logprobs import token_logprobs
from hetero_ee.decoding.result import FinishReason, GeneratedToken
from hetero_ee.decoding.sampling import Allowed, choose_token
from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.choice import Noise
from hetero_ee.runtime.executors.executor import Executor, Observe
from hetero_ee.text.text_stream import Decode, TextStream

if TYPE_CHECKING:
    from hetero_ee.decoding.constrained.constraint import Constraint

UNCACHED = -1  # no sequence of the KV cache has this number


@dataclass(slots=True)
class Ending:
    """What ends a text beside its sampling parameters."""

    eos_token_ids: frozenset[int]
    context_tokens: int  # prompt and text together
    grow: Callable[[int], int] | None = None  # asks for a context of so many tokens, see Executor.grow
    constrain: Callable[[SamplingParams], "Constraint | None"] | None = None  # what a new text may say

    def has_room(self, n_tokens: int) -> bool:
        """Whether the context holds so many tokens; where it does not, it grows if it can."""
        if n_tokens > self.context_tokens and self.grow is not None:
            self.context_tokens = self.grow(n_tokens)
        return n_tokens <= self.context_tokens


@dataclass(frozen=True, slots=True)
class Continuation:
    """One prompt whose first tokens lie in a sequence of the KV cache already.

    The sequence holds fewer tokens than the prompt, stays open, and at each token given out holds every token before
    it; after a pass that failed it may hold more, which are not to be trusted.
    """

    cached_as: int
    token_ids: list[int]


Prompts = Sequence[list[int]] | Continuation


@dataclass(slots=True)
class Text:
    """One sequence being generated."""

    sequence: int  # the prompt's index in its list
    token_ids: list[int]  # of prompt and text so far
    n_prompt_tokens: int
    stream: TextStream
    params: SamplingParams
    ending: Ending
    cached_as: int = UNCACHED  # its number in the KV cache
    began_s: float = 0.0  # by the clock that its tokens are timed by
    finished: bool = False
    constraint: "Constraint | None" = None

    @classmethod
    def of_prompt(
        cls,
        sequence: int,
        prompt_ids: list[int],
        params: SamplingParams,
        ending: Ending,
        decode: Decode,
        cached_as: int = UNCACHED,
        began_s: float = 0.0,
    ) -> "Text":
        """The text that follows these tokens, none of it there yet."""
        stream = TextStream(decode, prompt_ids, params.stop)
        constraint = None if ending.constrain is None else ending.constrain(params)
        ids = list(prompt_ids)
        return cls(sequence, ids, len(ids), stream, params, ending, cached_as, began_s, constraint=constraint)

    def allowed_after(self, history: Sequence[int]) -> Allowed | None:
        """The tokens that may follow all these, prompt and drafts included; None for all."""
        return None if self.constraint is None else self.constraint.allowed(history[self.n_prompt_tokens :])

    def forced_after(self, history: Sequence[int]) -> list[int]:
        """The tokens that must follow all these, as far as there is no choice."""
        return [] if self.constraint is None else self.constraint.forced(history[self.n_prompt_tokens :])

    def is_complete_after(self, history: Sequence[int]) -> bool:
        """Whether nothing may follow all these."""
        return self.constraint is not None and self.constraint.is_complete(history[self.n_prompt_tokens :])

    @property
    def tokens_left(self) -> int:
        """The most tokens that may still follow."""
        in_context = self.ending.context_tokens - len(self.token_ids)
        if self.params.max_new_tokens is None:
            return in_context
        return min(in_context, self.n_prompt_tokens + self.params.max_new_tokens - len(self.token_ids))

    def ends_with(self, token_id: int) -> bool:
        """Whether it ends with this token, which is no part of it."""
        is_eos = token_id in self.ending.eos_token_ids and not self.params.ignore_eos
        return is_eos or token_id in self.params.stop_token_ids


def texts_of(
    prompts: Prompts, params: SamplingParams, decode: Decode, ending: Ending, began_s: float = 0.0
) -> list[Text]:
    """A text for each prompt. Raises UsageError for one that the context has no room for and can't grow for."""
    longest = max(map(len, [prompts.token_ids] if isinstance(prompts, Continuation) else prompts), default=0)
    require_room(longest, ending)
    if isinstance(prompts, Continuation):
        return [Text.of_prompt(0, prompts.token_ids, params, ending, decode, prompts.cached_as, began_s)]
    return [
        Text.of_prompt(sequence, ids, params, ending, decode, began_s=began_s) for sequence, ids in enumerate(prompts)
    ]


def require_room(n_prompt_tokens: int, ending: Ending) -> None:
    """Raises UsageError where the context has no room for such a prompt and a token after it, and can't grow."""
    if not ending.has_room(n_prompt_tokens + 1):
        raise UsageError(
            f"the prompt has {n_prompt_tokens} tokens, the context holds {ending.context_tokens}, and no plan for more "
            "fits this machine; shorten it, or leave more memory to it."
        )


def room_for_reply(context_tokens: int, params: SamplingParams) -> int:
    """A quarter of the context, or all tokens that a reply may have where that is less."""
    return min(params.max_new_tokens or context_tokens, max(1, context_tokens // 4))


def common_length(first: list[int], second: list[int]) -> int:
    """Length of the longest common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def prefill(executor: Executor, text: Text, observe: Observe | None = None) -> Tensor:
    """Runs what the cache lacks of the prompt, in chunks; logits (vocab,) of its last token.

    Says how many tokens are read before each, and that all are once that is over.
    """
    executor.make_room({text.cached_as: text.n_prompt_tokens})
    n_cached = executor.cache.length(text.cached_as)
    n_missing = text.n_prompt_tokens - n_cached
    tell = executor.progress
    try:
        return executor.prompt(prompt_chunks(executor, text, n_cached, tell), observe)
    finally:  # also where Ctrl-C or an error ends it: what shows how far it is goes away
        if tell is not None:
            tell(READING, n_missing, n_missing)


def prompt_chunks(executor: Executor, text: Text, n_cached: int, tell: Progress | None = None) -> Iterator[Batch]:
    """What the cache lacks of the prompt, in passes; tell: as prefill says it."""
    prompt, n_tokens = text.token_ids[: text.n_prompt_tokens], executor.prompt_chunk_tokens
    for first in range(n_cached, len(prompt), n_tokens):
        if tell is not None:
            tell(READING, first - n_cached, len(prompt) - n_cached)
        yield Batch.of_sequence(text.cached_as, first, prompt[first : first + n_tokens], is_prompt=True)


def last_tokens(texts: Sequence[Text]) -> Batch:
    """The last token of each text."""
    return Batch(
        tuple(text.token_ids[-1] for text in texts),
        tuple(text.cached_as for text in texts),
        tuple(len(text.token_ids) - 1 for text in texts),
    )


def step(text: Text, logits: Tensor, now_s: float, noise: Noise | None = None) -> GeneratedToken:
    """Chooses one sequence's next token and decides whether its text ends there. noise: see choose_token."""
    history, params = text.token_ids, text.params
    allowed = text.allowed_after(history)
    token_id = choose_token(logits, history, params, text.sequence, len(history), noise, text.n_prompt_tokens, allowed)
    token = taken(text, token_id, now_s)
    if params.logprobs is None:
        return token
    return replace(token, logprobs=token_logprobs(logits, token_id, params.logprobs))


def taken(text: Text, token_id: int, now_s: float) -> GeneratedToken:
    """The text takes this token; whether it ends there."""
    position = len(text.token_ids)
    text.token_ids.append(token_id)
    is_end = text.ends_with(token_id)
    piece = "" if is_end else text.stream.add(token_id)
    reason = _finish_reason(text, is_end)
    if reason is not None:
        text.finished = True
        piece += text.stream.finish()
    elapsed_s = now_s - text.began_s
    return GeneratedToken(piece, token_id, text.sequence, position, reason, elapsed_s, text.stream.stopped_by)


def _finish_reason(text: Text, is_end: bool) -> FinishReason | None:
    if is_end or text.stream.stopped or text.is_complete_after(text.token_ids):
        return FinishReason.STOP
    if len(text.token_ids) - text.n_prompt_tokens == text.params.max_new_tokens:
        return FinishReason.LENGTH
    if not text.ending.has_room(len(text.token_ids) + 1):
        return FinishReason.CONTEXT
    return None
