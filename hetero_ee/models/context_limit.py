"""How long a text a model can read, and how long it was trained to."""

from collections.abc import Callable

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec


def check_context(spec: ModelSpec, n_tokens: int, what: str = "context size") -> None:
    """Raises UsageError for a context with more positions than the model has; `what` names it."""
    if not spec.context_is_fixed or n_tokens <= spec.max_context_tokens:
        return
    most, scaling = spec.max_context_tokens, spec.rope.scaling if spec.rope is not None else None
    if scaling is not None and scaling.original_context_tokens == most:
        raise UsageError(
            f"{what} {n_tokens} is beyond the {most} positions (original_max_position_embeddings) up to which this "
            "model's short rotary factors hold; its long ones are not supported."
        )
    raise UsageError(f"{what} {n_tokens} is beyond the {most} positions this model has.")


def warn_of_context(spec: ModelSpec, n_tokens: int, warn: Callable[[str], None]) -> None:
    """Says so where positions would come that the model was not trained on."""
    if n_tokens > spec.max_context_tokens:
        warn(
            f"the context of {n_tokens} tokens is longer than the {spec.max_context_tokens} this model was trained on; "
            "beyond them its text may make no sense."
        )
