"""How Hugging Face configurations describe rotary positions."""

import math
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.models.fields import Fields
from hetero_ee.models.rope import RopeScaling, RopeSpec

MIN_FACTOR, MAX_FACTOR = 1e-3, 1e6  # of frequencies; published ones lie from 1 to 64
KNOWN_FIELDS = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "short_factor",
    "long_factor",
    "attention_factor",
}


def read_rope(fields: Fields, head_dim: int, context_tokens: int, *, turns_part: bool) -> RopeSpec:
    """Reads both spellings, rope_parameters (transformers 5) and rope_theta with rope_scaling (before), which wins.

    turns_part: the family heeds partial_rotary_factor. In others transformers 5 ignores it where the kind is "default"
    and fails on it elsewhere.
    """
    parameters = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    theta = parameters.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if theta < 1:
        raise fields.fail(f"rope_theta is {theta:g}, expected 1 or more.")
    parameters.refuse_others(KNOWN_FIELDS)
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    kinds = ("default", "linear", "llama3", "longrope")
    if kind not in kinds:
        raise fields.fail(f"rope_type {shown(kind)} is not supported; supported are {', '.join(kinds)}.")
    if not turns_part and kind != "default" and int(head_dim * partial) != head_dim:
        raise fields.fail(
            f"partial_rotary_factor is {partial:g}, which this architecture does not have with rope_type {kind}; "
            "remove it."
        )
    n_features = int(head_dim * partial) if turns_part else head_dim
    if n_features < 2 or n_features % 2 or n_features > head_dim:
        raise fields.fail(
            f"partial_rotary_factor {partial:g} of head_dim {head_dim} turns {n_features} features, "
            "expected an even number of them."
        )
    if kind == "default":
        return RopeSpec(theta, n_features)
    default_tokens = parameters.integer("original_max_position_embeddings", context_tokens)
    original_tokens = fields.integer("original_max_position_embeddings", default_tokens, smallest=2)
    if kind == "longrope":
        n_pairs = n_features // 2
        return RopeSpec(theta, n_features, _longrope(fields, parameters, context_tokens, original_tokens, n_pairs))
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor", 1.0), parameters.number("high_freq_factor", 4.0)
    if factor < 1 or high <= low:
        raise fields.fail(
            f"rope factor {factor:g}, low_freq_factor {low:g} and high_freq_factor {high:g} are impossible, "
            "expected 1 or more, and the last above the second."
        )
    return RopeSpec(theta, n_features, RopeScaling(kind, factor, low, high, original_tokens))


def _longrope(
    fields: Fields, parameters: Fields, context_tokens: int, original_tokens: int, n_pairs: int
) -> RopeScaling:
    """Phi-3's long contexts (arXiv 2402.13753). The default magnitude is the paper's, from the ratio of contexts."""
    factors = parameters.get("short_factor", [])
    if not isinstance(factors, list | tuple) or len(factors) != n_pairs or not all(_is_factor(f) for f in factors):
        raise fields.fail(
            f"short_factor is {shown(factors)}, expected {n_pairs} numbers from {MIN_FACTOR:g} to {MAX_FACTOR:g}."
        )
    ratio = parameters.number("factor", context_tokens / original_tokens)
    magnitude = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original_tokens))
    return RopeScaling(
        kind="longrope",
        original_context_tokens=original_tokens,
        short_factors=tuple(float(factor) for factor in factors),
        magnitude=parameters.number("attention_factor", magnitude),
    )


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_FACTOR <= value <= MAX_FACTOR
