"""Results of generation: one record per token, and one for the whole text."""

from dataclasses import dataclass, field
from enum import StrEnum

from hetero_ee.decoding.logprobs import TokenLogprobs
from hetero_ee.errors import shown

FULL_MODEL, EXIT = "full", "exit"  # origins of tokens: all layers chose it; an exit did, or its draft was right
GRAMMAR = "grammar"  # a drafted token that the grammar forces


class FinishReason(StrEnum):
    """Reason for the end of a request."""

    STOP = "stop"  # an end token, a stop token, a stop string, or the end of a grammar
    LENGTH = "length"  # max_new_tokens
    CONTEXT = "context"  # the context is full


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """Source of a token, the number of layers after which it was known, and its place in its step."""

    name: str  # FULL_MODEL, EXIT, GRAMMAR, or of a draft source
    depth: int  # layers: of the exit, or all
    index: int = 0  # tokens of the same draft-verify step before it
    n_drafted: int = 0  # drafts of that step, right ones and wrong ones

    @property
    def is_accepted(self) -> bool:
        """Whether the token is an accepted draft."""
        return self.n_drafted > 0 and self.name != FULL_MODEL


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token. Joining the texts of all tokens gives the whole text."""

    text: str  # text added; empty while a partial character or stop string is held back
    token_id: int
    sequence: int  # index of the prompt in its list, from 0
    position: int  # index in its sequence, prompt included, from 0
    finish_reason: FinishReason | None  # None but for the last token
    elapsed_s: float  # since generation began, prompt included
    stopped_by: str | None = None  # the stop string that ended the text
    logprobs: TokenLogprobs | None = None  # if requested
    # How it came, not what it is. None: the full model's own, in a pass without drafts.
    origin: TokenOrigin | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A whole generated text. If prompts were generated together, the seconds are those of the whole batch."""

    text: str  # without the prompt, the end token and the stop string
    token_ids: tuple[int, ...]  # every generated token, the ending one too
    finish_reason: FinishReason
    n_prompt_tokens: int  # including a leading begin token
    prompt_s: float  # from the start until the first token was chosen
    generation_s: float  # from then to the last
    n_cached_tokens: int = 0  # prompt tokens already cached by earlier turns
    logprobs: tuple[TokenLogprobs, ...] = ()  # for each token, if requested

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return (
            f"<GenerationResult {shown(self.text)}, {self.n_generated_tokens} tokens, {self.finish_reason}, "
            f"{self.tokens_per_s:.1f} tokens/s, the first after {self.time_to_first_token_s:.2f} s>"
        )

    @property
    def time_to_first_token_s(self) -> float:
        """Same as prompt_s, under the name that benchmarks use."""
        return self.prompt_s

    @property
    def tokens_per_s(self) -> float:
        """Same as generated_tokens_per_s, under a shorter name."""
        return self.generated_tokens_per_s

    @property
    def n_prefilled_tokens(self) -> int:
        """Number of prompt tokens that were not cached."""
        return self.n_prompt_tokens - self.n_cached_tokens

    @property
    def n_generated_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.n_prefilled_tokens / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        """Tokens after the first per second of generation time, which is the rate of decode steps. 0 for a single
        token."""
        return (self.n_generated_tokens - 1) / self.generation_s if self.generation_s > 0 else 0.0


def collect(tokens: list[GeneratedToken], n_cached_tokens: int = 0) -> GenerationResult:
    """Return the result of one request's tokens, at least one. If it was interrupted, the finish reason is `length`."""
    first_s, last_s = tokens[0].elapsed_s, tokens[-1].elapsed_s
    return GenerationResult(
        text="".join(token.text for token in tokens),
        token_ids=tuple(token.token_id for token in tokens),
        finish_reason=tokens[-1].finish_reason or FinishReason.LENGTH,
        n_prompt_tokens=tokens[0].position,  # positions count from the prompt's beginning
        prompt_s=first_s,
        generation_s=last_s - first_s,
        n_cached_tokens=n_cached_tokens,
        logprobs=tuple(token.logprobs for token in tokens if token.logprobs is not None),
    )
