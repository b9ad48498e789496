"""A request's sampling fields: reads the supported ones by the table of sampling options, and refuses others."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from hetero_ee.errors import UsageError
from hetero_ee.options.option import Pairs, Schema
from hetero_ee.options.sampling import SAMPLING, SamplingParams
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.protocols.body import Fields, read_body
from hetero_ee.serving.settings import ServerSettings

NOT_OFFERED = "this server does not offer that; leave it out"
ZERO, ONE = (0, 0.0), (1, 1.0)
# Fields that would change the answer and can't be honoured, with the values that ask for nothing. Other unknown
# fields are ignored.
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
    "verbosity": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
READERS: dict[Any, Callable[[Fields, str], Any]] = {
    int: Fields.whole,
    float: Fields.number,
    bool: lambda fields, name: None if fields.values.get(name) is None else fields.flag(name),
    tuple[str, ...]: lambda fields, name: fields.texts(name) or None,
    tuple[int, ...]: Fields.items,
    Pairs: lambda fields, name: _bias(fields, name),
}


def refuse_unsupported(fields: Fields, *tables: dict[str, tuple[Any, ...]]) -> None:
    """Check that no field requests an unsupported feature. Raises: RequestError: names the first field that does."""
    for table in tables:
        for name, harmless in table.items():
            fields.refuse_unless(name, harmless, NOT_OFFERED)


async def read_request(request: Request, settings: ServerSettings, *refused: dict[str, tuple[Any, ...]]) -> Fields:
    """Read a request for text, and check that it uses no unsupported fields.

    `model` is only checked to be text here, since app.py chooses the model.
    """
    fields = await read_body(request, settings)
    refuse_unsupported(fields, *refused)
    fields.text("model")
    return fields


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Sampling options in a protocol's requests, with the protocol's field names."""

    protocol: str  # "openai", "responses", "anthropic" or "ollama"
    has_stand_ins: bool = True  # -1 for no limit, every candidate or a random seed
    logprobs: str = "logprobs"  # the field that asks for log-probabilities

    def read(
        self, fields: Fields, usual: SamplingParams, vocab_size: int, n_logprobs: int | None = None
    ) -> SamplingParams:
        """Return the usual parameters changed by a request's fields. A request without a seed gets a random one.

        Args:
            n_logprobs: Value of `SamplingParams.logprobs`, which each endpoint reads in its own way.

        Raises:
            RequestError: if a field has an impossible value; it names the field as in the request.
        """
        given: dict[str, Any] = {} if n_logprobs is None else {"logprobs": n_logprobs}
        used = {"logprobs": self.logprobs}
        for name, option in SAMPLING.items():
            names = option.fields_of(self.protocol)
            found = [(field, value) for field in names if (value := READERS[option.kind](fields, field)) is not None]
            if names:
                used[name], value = found[0] if found else (names[0], None)
            if found:
                is_stand_in = self.has_stand_ins and isinstance(value, int) and value in option.stand_ins
                given[name] = option.stand_ins[value] if is_stand_in else value
        if given.get("repeat_penalty") not in (None, 1.0):
            why = "the penalty applies to all tokens here, prompt included; leave it out"
            fields.refuse_unless("repeat_last_n", (-1,), why)
        if given.get("seed") is None:
            given["seed"] = secrets.randbits(32)
        return changed(usual, given, used, vocab_size)

    def schemas(self) -> dict[str, Schema]:
        return {
            field: option.schema(with_stand_ins=self.has_stand_ins)
            for option in SAMPLING.values()
            for field in option.fields_of(self.protocol)
        }


CHATS = SamplingFields("openai", logprobs="top_logprobs")
TEXTS = SamplingFields("openai")
RESPONSES = SamplingFields("responses")
MESSAGES = SamplingFields("anthropic", has_stand_ins=False)
OPTIONS = SamplingFields("ollama")


def changed(
    usual: SamplingParams, values: Mapping[str, Any], used: Mapping[str, str], vocab_size: int
) -> SamplingParams:
    """Return the usual parameters with these values. `used` has the request's field for each option."""
    try:
        params = usual.changed(**values)
        params.require_known(vocab_size)
        return params
    except UsageError as error:
        field = next((used[str(part)] for part in error.args if str(part) in used), None)
        message = error.spelled(lambda option: used.get(str(option), str(option)))
        raise RequestError(message, field, code="invalid_value") from error


def _bias(fields: Fields, name: str) -> list[Any] | None:
    """Return the pairs of an object with text keys, or of a list of pairs as in llama-server."""
    value = fields.values.get(name)
    if value is None or isinstance(value, list):
        return fields.items(name)
    given = fields.inner(name).values
    return [(int(key) if key.isdecimal() and len(key) <= 10 else key, bias) for key, bias in given.items()]
