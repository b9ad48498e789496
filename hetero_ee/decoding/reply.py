"""A reply while it is generated: an iterator over its tokens that has the result so far."""

from collections.abc import Generator, Iterator
from typing import Self

from hetero_ee.decoding.result import GeneratedToken, GenerationResult, collect
from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams


class Reply(Iterator[GeneratedToken]):
    """The tokens of one turn. Nothing is computed before the first is asked for.

    sampling: what it is generated with. n_prompt_tokens: tokens of the conversation before it; n_cached_tokens: how
    many of them the KV cache held already. n_forgotten_messages: of the oldest, for want of room in the context.
    """

    def __init__(
        self,
        tokens: Generator[GeneratedToken],
        sampling: SamplingParams,
        n_prompt_tokens: int,
        n_cached_tokens: int,
        n_forgotten_messages: int,
    ) -> None:
        self._tokens, self._seen = tokens, list[GeneratedToken]()
        self.sampling = sampling
        self.n_prompt_tokens = n_prompt_tokens
        self.n_cached_tokens = n_cached_tokens
        self.n_forgotten_messages = n_forgotten_messages

    @property
    def n_prefilled_tokens(self) -> int:
        """Tokens of the conversation before it that were computed for it."""
        return self.n_prompt_tokens - self.n_cached_tokens

    @property
    def result(self) -> GenerationResult | None:
        """The reply so far, None before the first token."""
        return collect(self._seen, self.n_cached_tokens) if self._seen else None

    def finish(self) -> GenerationResult:
        """Generate the rest and return the whole. Raises HeteroError if it was ended before its first token."""
        for _ in self:
            pass
        if self.result is None:
            raise HeteroError("this reply was ended before its first token; send the message again.")
        return self.result

    def close(self) -> None:
        """End the reply where it is."""
        self._tokens.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GeneratedToken:
        token = next(self._tokens)
        self._seen.append(token)
        return token
