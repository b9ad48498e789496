"""List fields of a Hugging Face generation configuration that this engine does not support."""

from collections.abc import Mapping
from typing import Any

from hetero_ee.errors import shown

# Each with the value that, like null, asks for nothing. Beams' own settings say nothing without num_beams. Settings of
# speed or of transformers' output change no text.
OF_EVERY_TEXT: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "guidance_scale": 1,
    "sequence_bias": {},
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "min_length": 0,
    "min_new_tokens": 0,
    "max_length": None,
    "max_time": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "token_healing": False,
    "watermarking_config": None,
}
OF_SAMPLED_TEXT: dict[str, Any] = {"top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
ALL = OF_EVERY_TEXT.keys() | OF_SAMPLED_TEXT.keys()


def ignored(values: Mapping[str, Any], context_tokens: int | None = None) -> str:
    """Describe the settings in `values` that this engine ignores; empty if there are none.

    Args:
        context_tokens: the model's maximum. A max_length that is not below it has no effect and is left out.
    """
    neutral = OF_EVERY_TEXT | (OF_SAMPLED_TEXT if values.get("do_sample") else {})
    if values.get("max_new_tokens") is not None:  # it comes before max_length
        del neutral["max_length"]
    asked = {name: values[name] for name in neutral if values.get(name) not in (None, neutral[name])}
    most = asked.get("max_length")
    if isinstance(most, int) and context_tokens is not None and most >= context_tokens:
        del asked["max_length"]
    *others, last = [f"{name} {shown(value)}" for name, value in asked.items()] or [""]
    return f"{', '.join(others)} and {last}" if others else last
