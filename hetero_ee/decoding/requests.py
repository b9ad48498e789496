"""Requests: how each begins, gets a token and ends, in every mode."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
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

MARKED_MESSAGES = 2  # the user's last message may be edited, and the reply before it rendered in another way
UNCACHED = -1  # no sequence of the KV cache has this number


@dataclass(slots=True)
class Ending:
    """Conditions that end a request in addition to its sampling parameters."""

    eos_token_ids: frozenset[int]
    context_tokens: int  # prompt and generated tokens together
    grow: Callable[[int], int] | None = None  # grows the context, see Executor.grow
    constrain: Callable[[SamplingParams], "Constraint | None"] | None = None  # makes the grammar of a new request

    def has_room(self, n_tokens: int) -> bool:
        """Return whether the context holds n_tokens. A context that is too short grows if it can."""
        if n_tokens > self.context_tokens and self.grow is not None:
            self.context_tokens = self.grow(n_tokens)
        return n_tokens <= self.context_tokens


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt whose first tokens are already in a sequence of the KV cache.

    The sequence holds fewer tokens than the prompt and stays open. Whenever a token is emitted, it holds all earlier
    tokens. After a failed pass it may hold more tokens, which must not be used.
    """

    kv_sequence: int
    token_ids: list[int]


Prompts = Sequence[list[int]] | Continuation


@dataclass(slots=True)
class Request:
    """A prompt and the tokens generated after it so far."""

    index: int  # index of the prompt in its list; selects its noise
    token_ids: list[int]  # prompt and generated tokens
    n_prompt_tokens: int
    stream: TextStream
    params: SamplingParams
    ending: Ending
    kv_sequence: int = UNCACHED  # sequence number in the KV cache
    began_s: float = 0.0  # by the clock that its tokens are timed by
    finished: bool = False
    constraint: "Constraint | None" = None

    @classmethod
    def of_prompt(
        cls,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        ending: Ending,
        decode: Decode,
        kv_sequence: int = UNCACHED,
        began_s: float = 0.0,
    ) -> "Request":
        """Return a request for a prompt, with no generated tokens."""
        stream = TextStream(decode, prompt_ids, params.stop)
        constraint = None if ending.constrain is None else ending.constrain(params)
        ids = list(prompt_ids)
        return cls(index, ids, len(ids), stream, params, ending, kv_sequence, began_s, constraint=constraint)

    def choose(self, logits: Tensor, history: Sequence[int], noise: Noise | None = None) -> int:
        """Sample the token after this history from logits (vocab,). For `noise`, see choose_token."""
        params, n_prompt_tokens, allowed = self.params, self.n_prompt_tokens, self.allowed_after(history)
        return choose_token(
            logits,
            history,
            params,
            self.index,
            len(history),
            noise=noise,
            n_prompt_tokens=n_prompt_tokens,
            allowed=allowed,
        )

    def allowed_after(self, history: Sequence[int]) -> Allowed | None:
        """Return a mask of the tokens that may follow the history (prompt, tokens and drafts), or None if all may."""
        return None if self.constraint is None else self.constraint.allowed(history[self.n_prompt_tokens :])

    def forced_after(self, history: Sequence[int]) -> list[int]:
        return [] if self.constraint is None else self.constraint.forced(history[self.n_prompt_tokens :])

    def is_complete_after(self, history: Sequence[int]) -> bool:
        """Return whether the grammar allows no token after the history."""
        return self.constraint is not None and self.constraint.is_complete(history[self.n_prompt_tokens :])

    @property
    def tokens_left(self) -> int:
        """Upper bound on the number of tokens still to be generated."""
        in_context = self.ending.context_tokens - len(self.token_ids)
        if self.params.max_new_tokens is None:
            return in_context
        return min(in_context, self.n_prompt_tokens + self.params.max_new_tokens - len(self.token_ids))

    def ends_with(self, token_id: int) -> bool:
        """Return whether this token is an end token or stop token of the request."""
        is_eos = token_id in self.ending.eos_token_ids and not self.params.ignore_eos
        return is_eos or token_id in self.params.stop_token_ids


def requests_of(
    prompts: Prompts, params: SamplingParams, decode: Decode, ending: Ending, began_s: float = 0.0
) -> list[Request]:
    """Return a request for each prompt. Raises: UsageError: if the context can't hold the longest one."""
    longest = max(map(len, [prompts.token_ids] if isinstance(prompts, Continuation) else prompts), default=0)
    require_room(longest, ending)
    if isinstance(prompts, Continuation):
        return [Request.of_prompt(0, prompts.token_ids, params, ending, decode, prompts.kv_sequence, began_s)]
    return [
        Request.of_prompt(sequence, ids, params, ending, decode, began_s=began_s)
        for sequence, ids in enumerate(prompts)
    ]


def require_room(n_prompt_tokens: int, ending: Ending) -> None:
    """Check that the context can hold the prompt and a token after it. Raises: UsageError: if it can't."""
    if not ending.has_room(n_prompt_tokens + 1):
        raise UsageError(
            f"the prompt has {n_prompt_tokens} tokens, the context holds {ending.context_tokens}, and no plan for more "
            "fits this machine; shorten it, or leave more memory to it."
        )


def room_for_reply(context_tokens: int, params: SamplingParams) -> int:
    """Return the tokens to keep free for a reply: a quarter of the context, or max_new_tokens if that is less."""
    return min(params.max_new_tokens or context_tokens, max(1, context_tokens // 4))


def common_length(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def prefill(
    executor: Executor,
    request: Request,
    observe: Observe | None = None,
    some: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
) -> Tensor:
    """Read the part of the prompt that is not cached, in chunks, and return the last token's logits (vocab,).

    Reports the progress before each chunk and at the end. `some` selects the chunks to read in this call. State
    is kept where a later prompt is likely to differ from this one, see marked_lengths().
    """
    executor.make_room({request.kv_sequence: request.n_prompt_tokens})
    n_cached = executor.cache.length(request.kv_sequence)
    n_missing = request.n_prompt_tokens - n_cached
    tell, marks, logits = executor.progress, marked_lengths(executor, request), None
    try:
        chunks = some(prompt_chunks(executor, request, n_cached, marks, tell))
        for _, group in groupby(chunks, lambda chunk: sum(mark <= chunk.positions[0] for mark in marks)):
            logits = executor.prompt(group, observe)
            if executor.cache.length(request.kv_sequence) in marks:
                executor.cache.mark(request.kv_sequence)
        assert logits is not None, "a prompt has a token that is not cached"
        return logits
    finally:  # also where Ctrl-C or an error ends it: what shows how far it is goes away
        if tell is not None:
            tell(READING, n_missing, n_missing)


def marked_lengths(executor: Executor, request: Request) -> list[int]:
    """Return the numbers of tokens after which the state is kept, ascending; none if it can be rolled back anyway.

    These are the ends of the prompt's last messages: the next prompt of a chat continues after one of them, though the
    template may render the last reply in another way. A text without messages is kept where its last chunk begins.
    """
    if not executor.cache.is_bounded:
        return []
    prompt, n_tokens = request.token_ids[: request.n_prompt_tokens], executor.prompt_chunk_tokens
    ends = [at for at in range(1, len(prompt)) if prompt[at - 1] in request.ending.eos_token_ids]
    return ends[-MARKED_MESSAGES:] or [at for at in ((len(prompt) - 1) // n_tokens * n_tokens,) if at]


def prompt_chunks(
    executor: Executor, request: Request, n_cached: int, marks: Sequence[int] = (), tell: Progress | None = None
) -> Iterator[Batch]:
    """Yield chunks of the part of the prompt that is not cached, and report the progress to `tell`.

    A chunk ends at each of the lengths `marks`.
    """
    prompt, first = request.token_ids[: request.n_prompt_tokens], n_cached
    while first < len(prompt):
        if tell is not None:
            tell(READING, first - n_cached, len(prompt) - n_cached)
        end = min(first + executor.prompt_chunk_tokens, *(mark for mark in (*marks, len(prompt)) if mark > first))
        yield Batch.of_sequence(request.kv_sequence, first, prompt[first:end], is_prompt=True)
        first = end


def last_tokens(requests: Sequence[Request]) -> Batch:
    return Batch(
        tuple(request.token_ids[-1] for request in requests),
        tuple(request.kv_sequence for request in requests),
        tuple(len(request.token_ids) - 1 for request in requests),
    )


def step(request: Request, logits: Tensor, now_s: float, noise: Noise | None = None) -> GeneratedToken:
    """Choose the request's next token and append it. For `noise`, see choose_token."""
    token_id = request.choose(logits, request.token_ids, noise)
    token, n_top = taken(request, token_id, now_s), request.params.logprobs
    return token if n_top is None else replace(token, logprobs=token_logprobs(logits, token_id, n_top))


def taken(request: Request, token_id: int, now_s: float) -> GeneratedToken:
    """Append a chosen token to the request, and end the request if necessary."""
    position = len(request.token_ids)
    request.token_ids.append(token_id)
    is_end = request.ends_with(token_id)
    piece = "" if is_end else request.stream.add(token_id)
    reason = _finish_reason(request, is_end)
    if reason is not None:
        request.finished = True
        piece += request.stream.finish()
    elapsed_s = now_s - request.began_s
    return GeneratedToken(piece, token_id, request.index, position, reason, elapsed_s, request.stream.stopped_by)


def _finish_reason(request: Request, is_end: bool) -> FinishReason | None:
    if is_end or request.stream.stopped or request.is_complete_after(request.token_ids):
        return FinishReason.STOP
    if len(request.token_ids) - request.n_prompt_tokens == request.params.max_new_tokens:
        return FinishReason.LENGTH
    if not request.ending.has_room(len(request.token_ids) + 1):
        return FinishReason.CONTEXT
    return None
