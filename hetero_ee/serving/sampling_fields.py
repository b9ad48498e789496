"""From a request's fields to how tokens are chosen: one table of what is taken, one of what is refused."""

import secrets
from typing import Any

from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.errors import UsageError
from hetero_ee.serving.body import Fields
from hetero_ee.serving.errors import RequestError

NOT_OFFERED = "this server does not offer that; leave it out"
ZERO, ONE = (0, 0.0), (1, 1.0)
# What would change the answer and can't be done, with the values that ask for nothing. Others unknown are ignored.
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": ONE,
    "prompt_logprobs": (False,),
    "n_probs": (0,),
    "guided_regex": (),
    "structured_outputs": (),
    "suffix": ("",),
    "min_tokens": ZERO,
    "n_keep": (0, -1),
    "typical_p": ONE,
    "mirostat": ZERO,
    "xtc_probability": ZERO,
    "dry_multiplier": ZERO,
    "dynatemp_range": ZERO,
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "length_penalty": ONE,
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "samplers": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "tfs_z": ONE,
    "lora": ([],),
}
REFUSED_IN_TEXTS: dict[str, tuple[Any, ...]] = {"top_logprobs": (0,)}
REFUSED_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
OPENAI_NAMES = {"max_new_tokens": "max_tokens"}  # of fields of SamplingParams, where they differ
CHAT_NAMES = OPENAI_NAMES | {"logprobs": "top_logprobs"}


def refuse_unsupported(fields: Fields, *tables: dict[str, tuple[Any, ...]]) -> None:
    """Raises RequestError for a field that asks for what is not offered."""
    for table in tables:
        for name, harmless in table.items():
            fields.refuse_unless(name, harmless, NOT_OFFERED)


def openai_sampling(
    fields: Fields, usual: SamplingParams, n_logprobs: int | None, names: dict[str, str], vocab_size: int
) -> SamplingParams:
    """As OpenAI's clients say it, with llama-server's and vLLM's names for what OpenAI lacks.

    n_logprobs: as SamplingParams.logprobs. names: as `changed` takes them. Raises RequestError.
    """
    penalty = _either(fields, "repeat_penalty", "repetition_penalty")
    if penalty not in (None, 1.0):
        fields.refuse_unless("repeat_last_n", (-1,), "the penalty here is of all tokens, prompt included; leave it out")
    values = {
        "max_new_tokens": _length(fields, usual),
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p"),
        "repeat_penalty": penalty,
        "seed": _seed(fields),
        "stop": fields.texts("stop") or None,
        "stop_token_ids": fields.items("stop_token_ids"),
        "ignore_eos": fields.flag("ignore_eos"),
        "logprobs": n_logprobs,
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "logit_bias": _bias(fields),
    }
    return changed(usual, values, names, vocab_size)


def changed(
    usual: SamplingParams, values: dict[str, Any], names: dict[str, str], vocab_size: int | None = None
) -> SamplingParams:
    """These values in place of the usual ones; None keeps one, but of `max_new_tokens`. names: as requests have them.

    vocab_size: the model's, where token ids may be among them. Raises RequestError.
    """
    given = {name: value for name, value in values.items() if value is not None or name == "max_new_tokens"}
    try:
        params = usual.changed(**given)
        if vocab_size is not None:
            params.require_known(vocab_size)
        return params
    except UsageError as error:
        message = str(error)
        name = message.partition(" ")[0]
        renamed = names.get(name, name)
        raise RequestError(renamed + message.removeprefix(name), renamed, code="invalid_value") from error


def new_seed() -> int:
    """One that nobody chose."""
    return secrets.randbits(32)


def _length(fields: Fields, usual: SamplingParams) -> int | None:
    """None: until the text ends, as -1 asks for too."""
    lengths = [fields.whole(name) for name in ("max_completion_tokens", "max_tokens", "n_predict")]
    given = next((each for each in lengths if each is not None), None)
    if given is None:
        return usual.max_new_tokens
    return None if given == -1 else given


def _top_k(fields: Fields) -> int | None:
    value = fields.whole("top_k")
    return 0 if value == -1 else value


def _seed(fields: Fields) -> int:
    value = fields.whole("seed")
    return new_seed() if value is None or value == -1 else value


def _bias(fields: Fields) -> list[Any] | None:
    """Pairs, of an object, whose names are text, or of a list of pairs, as llama-server takes them too."""
    if isinstance(fields.values.get("logit_bias"), list):
        return fields.items("logit_bias")
    given = fields.inner("logit_bias").values
    return [(int(name) if name.isdecimal() and len(name) <= 10 else name, bias) for name, bias in given.items()]


def _either(fields: Fields, *names: str) -> float | None:
    return next((value for name in names if (value := fields.number(name)) is not None), None)
