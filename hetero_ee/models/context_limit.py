"""Check and warn about a model's context: the positions that it has, and those it was trained on."""

from collections.abc import Callable

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec


def check_context(spec: ModelSpec, n_tokens: int, what: str = "context size") -> None:
    """Refuse a context, called `what`, beyond the model's fixed number of positions. Raises: UsageError."""
    if spec.context_is_fixed and n_tokens > spec.max_context_tokens:
        raise UsageError(f"{what} {n_tokens} is beyond the {spec.max_context_tokens} positions this model has.")


def beyond_context(what: str, most_tokens: int, spec: ModelSpec, *, larger: str = "raise the context size") -> str:
    """Return the message for a text that the context can't hold.

    Args:
        what: The text and its number of tokens, in words.
        larger: How the caller gets a larger context.
    """
    limit = f"{what}; the context limit is {most_tokens}, including one generated token; shorten it"
    if most_tokens >= spec.max_context_tokens:
        return f"{limit}, since the model's maximum is {spec.max_context_tokens}."
    return f"{limit} or {larger} (the model's maximum is {spec.max_context_tokens})."


def warn_of_context(spec: ModelSpec, n_tokens: int, warn: Callable[[str], None]) -> None:
    """Warn if a context has positions that the model was not trained on, or that change its rotary angles."""
    if n_tokens <= spec.max_context_tokens:
        return
    scaling = None if spec.rope is None else spec.rope.scaling
    if scaling is not None and n_tokens <= scaling.longest_context_tokens:
        warn(
            f"the context of {n_tokens} tokens is longer than this model's original {spec.max_context_tokens}, so its "
            f"rotary positions are stretched ({scaling.kind}), those of short texts too; a smaller context leaves them."
        )
    else:
        warn(
            f"the context of {n_tokens} tokens is longer than the {spec.max_context_tokens} this model was trained on; "
            "quality may degrade beyond them."
        )
