"""Read the fields of rotary embeddings in Hugging Face configurations."""

import math
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.layers.rope import RopeScaling, RopeSpec
from hetero_ee.models.families.family import FULL, SLIDING
from hetero_ee.models.fields import MAX_SIZE, Fields

MIN_FACTOR, MAX_FACTOR = 1e-3, 1e6  # of frequencies; published ones are 1 to 64
PROPORTIONAL = "proportional"
KINDS = ("default", "linear", "llama3", "longrope", "yarn", "dynamic", PROPORTIONAL)
KNOWN_FIELDS = {
    *("rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}
# The last two have no effect. read_growth reads the one before them.
YARN_FIELDS = {
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta"),
    *("finetuned", "max_position_embeddings"),
}


def read_rope(fields: Fields, head_dim: int, context_tokens: int, *, rotates_part: bool) -> RopeSpec:
    """Read rope settings from rope_parameters (transformers 5), or from rope_theta with rope_scaling, which wins.

    Args:
        rotates_part: whether the family applies partial_rotary_factor. For other families transformers 5 ignores it if
            the kind is "default" and fails otherwise.
    """
    parameters = _parameters(fields)
    theta = parameters.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if theta < 1:
        raise fields.fail(f"rope_theta is {theta:g}, expected 1 or more.")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind == "su" or (kind == "yarn" and rotates_part):  # its former names
        kind = "longrope"
    if kind not in KINDS:
        raise fields.fail(f"rope_type {shown(kind)} is not supported; supported are {', '.join(KINDS)}.")
    parameters.refuse_others(KNOWN_FIELDS | (YARN_FIELDS if kind == "yarn" else set()))
    if kind == PROPORTIONAL:
        return _proportional(fields, parameters.number("factor", 1.0), partial, theta, head_dim)
    if not rotates_part and kind != "default" and int(head_dim * partial) != head_dim:
        raise fields.fail(
            f"partial_rotary_factor is {partial:g}, which this architecture does not have with rope_type {kind}; "
            "remove it."
        )
    n_features = int(head_dim * partial) if rotates_part else head_dim
    if n_features < 2 or n_features % 2 or n_features > head_dim:
        raise fields.fail(
            f"partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {n_features} features, "
            "expected an even number of them."
        )
    if kind == "default":
        return RopeSpec(theta, n_features)
    return RopeSpec(theta, n_features, _scaling(fields, parameters, kind, context_tokens, theta, n_features))


def _parameters(fields: Fields) -> Fields:
    return fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")


def _proportional(fields: Fields, factor: float, partial: float, theta: float, head_dim: int) -> RopeSpec:
    """Read Gemma 4's rotary embedding: the fastest pairs of the whole head rotate, the others have frequency 0."""
    n_pairs, n_rotating = head_dim // 2, int(partial * head_dim // 2)
    if head_dim % 2 or not 0 <= n_rotating <= n_pairs or not MIN_FACTOR <= factor <= MAX_FACTOR:
        raise fields.fail(
            f"rope factor {factor:g} with partial_rotary_factor {partial:g} of head_dim {head_dim} is impossible; "
            "expected a share of an even number of features."
        )
    divisors = (factor,) * n_rotating + (math.inf,) * (n_pairs - n_rotating)
    return RopeSpec(theta, head_dim, RopeScaling("longrope", short_factors=divisors, long_factors=divisors))


def read_growth(fields: Fields) -> tuple[float, int] | None:
    """Read how much queries grow with their position, see AttentionSpec; None if they don't."""
    parameters = _parameters(fields)
    growth = parameters.number("llama_4_scaling_beta", 0.0)
    return (growth, parameters.integer("original_max_position_embeddings")) if growth else None


def read_score_factor(fields: Fields) -> float:
    """Read DeepSeek's factor of attention scores, the square of YaRN's growth by mscale_all_dim; 1 without YaRN."""
    parameters = _parameters(fields)
    if parameters.text("rope_type", parameters.text("type", "default")) == "default":
        return 1.0
    return _growth(max(parameters.number("factor", 1.0), 1.0), parameters.number("mscale_all_dim", 0.0)) ** 2


def of_layer_kind(fields: Fields, kind: str, theta: float) -> Fields:
    """Return the fields for layers of one kind, whose rope_theta is `theta`, if kinds rotate differently.

    transformers 5 has rope_parameters per kind. In older files, rope_scaling applies only to FULL layers.
    """
    parameters = fields.section("rope_parameters")
    own = parameters.section(kind)
    if parameters.get(FULL) is None and parameters.get(SLIDING) is None:
        own = fields.section("rope_scaling") if kind == FULL else own
    return fields.with_values(rope_parameters=own.values(rope_theta=theta), rope_scaling=None, rope_theta=theta)


def without_mrope(fields: Fields) -> Fields:
    """Return the fields of a model whose positions have three parts, which are equal in texts: it rotates as usual."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.section(name)
        if rope.get("mrope_section") is not None:
            kinds = {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
            plain = rope.values() | kinds | {"mrope_section": None, "mrope_interleaved": None}
            fields = fields.with_values(**{name: plain})
    return fields


def _scaling(
    fields: Fields, parameters: Fields, kind: str, context_tokens: int, theta: float, n_features: int
) -> RopeScaling:
    default_tokens = parameters.integer("original_max_position_embeddings", context_tokens)
    original_tokens = fields.integer("original_max_position_embeddings", default_tokens, smallest=2)
    if kind == "longrope":
        return _longrope(fields, parameters, context_tokens, original_tokens, n_features // 2)
    if kind == "yarn":
        is_named = any(each.get("original_max_position_embeddings") is not None for each in (fields, parameters))
        return _yarn(fields, parameters, context_tokens, original_tokens if is_named else None, theta)
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor", 1.0), parameters.number("high_freq_factor", 4.0)
    if factor < 1 or high <= low:
        raise fields.fail(
            f"rope factor {factor:g}, low_freq_factor {low:g} and high_freq_factor {high:g} are impossible, "
            "expected 1 or more, and the last above the second."
        )
    if kind != "dynamic":
        return RopeScaling(kind, factor, low, high, original_tokens)
    if n_features < 4:
        raise fields.fail(
            f"rope_type dynamic with {n_features} features that rotate is impossible, expected 4 or more."
        )
    longest_tokens = _product(factor, context_tokens)  # relative to the context in the file
    return RopeScaling(kind, factor, original_context_tokens=context_tokens, longest_context_tokens=longest_tokens)


def _yarn(
    fields: Fields, parameters: Fields, context_tokens: int, original_tokens: int | None, theta: float
) -> RopeScaling:
    """Read YaRN. The default magnitude is the paper's; mscale and mscale_all_dim are DeepSeek's."""
    factor = parameters.number("factor", context_tokens / original_tokens if original_tokens else None)
    fast, slow = parameters.number("beta_fast", 0.0) or 32.0, parameters.number("beta_slow", 0.0) or 1.0
    if not 1 <= factor <= MAX_FACTOR or not MIN_FACTOR <= slow <= fast <= MAX_FACTOR or theta == 1:
        raise fields.fail(
            f"rope factor {factor:g}, beta_slow {slow:g}, beta_fast {fast:g} and rope_theta {theta:g} are impossible; "
            f"expected a factor from 1 to {MAX_FACTOR:g}, beta_slow up to beta_fast, and rope_theta above 1."
        )
    above, below = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    magnitude = _growth(factor, above) / _growth(factor, below) if above and below else _growth(factor, 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        low_frequency_factor=slow,
        high_frequency_factor=fast,
        original_context_tokens=original_tokens or context_tokens,
        magnitude=parameters.number("attention_factor", magnitude),
        whole_pairs=not parameters.is_null("truncate") and parameters.flag("truncate", True),
        longest_context_tokens=_product(factor, original_tokens) if original_tokens else context_tokens,
    )


def _growth(factor: float, scale: float) -> float:
    """Return YaRN's factor of queries and keys, since a longer context makes attention less sharp (section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1


def _product(factor: float, n_tokens: int) -> int:
    return int(min(factor * n_tokens, MAX_SIZE))


def own_context(rope: RopeSpec, context_tokens: int) -> int:
    """Return the model's context by default. `context_tokens` is its max_position_embeddings."""
    scaling = rope.scaling
    if scaling.kind == "longrope":  # up to which the short factors apply
        return min(context_tokens, scaling.original_context_tokens)
    # Files with yarn often name the original context there too.
    return max(context_tokens, scaling.longest_context_tokens) if scaling.kind == "yarn" else context_tokens


def _longrope(
    fields: Fields, parameters: Fields, context_tokens: int, original_tokens: int, n_pairs: int
) -> RopeScaling:
    """Read Phi-3's long contexts (arXiv 2402.13753). The default magnitude is the paper's, from the contexts' ratio."""
    short, long = (_factors(fields, parameters, name, n_pairs) for name in ("short_factor", "long_factor"))
    ratio = parameters.number("factor", context_tokens / original_tokens)
    magnitude = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original_tokens))
    return RopeScaling(
        kind="longrope",
        original_context_tokens=original_tokens,
        short_factors=short,
        long_factors=long,
        magnitude=parameters.number("attention_factor", magnitude),
        longest_context_tokens=context_tokens,
    )


def _factors(fields: Fields, parameters: Fields, name: str, n_pairs: int) -> tuple[float, ...]:
    factors = parameters.get(name, [])
    if not isinstance(factors, list | tuple) or len(factors) != n_pairs or not all(_is_factor(f) for f in factors):
        raise fields.fail(
            f"{name} is {shown(factors)}, expected {n_pairs} numbers from {MIN_FACTOR:g} to {MAX_FACTOR:g}."
        )
    return tuple(float(factor) for factor in factors)


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_FACTOR <= value <= MAX_FACTOR
