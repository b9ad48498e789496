"""Declare SamplingParams: the options that choose the tokens of a sequence and decide when it ends."""

import json
from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self, TypedDict

from hetero_ee.errors import UsageError, meant, shown
from hetero_ee.options import generation_keys
from hetero_ee.options.option import Option, Pairs, Range, Requests, options_of

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000
MAX_LOGPROBS = 20
MAX_BIASES = 1024  # each takes time at every token
UNLIMITED = RANDOM = -1  # stand-ins for a length and a seed, as in llama.cpp

TOKEN_ID = Option("A token id.", kind=int, least=0, most=2**31)
BIAS = Option("A bias.", kind=float, least=-100.0, most=100.0)
SIMPLE_KINDS = (int, float, bool)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options that decide how tokens are chosen and when a sequence ends.

    Raises:
        UsageError: if a value is out of its range.
    """

    max_new_tokens: Annotated[
        int | None,
        Option(
            "Tokens to generate; -1: until the text ends.",
            ("-n", "--max-tokens", "--max-new-tokens", "--n-predict", "--predict"),
            default_text="the model's own, else until the text ends",
        ),
        Range(1, 2**31),
        Requests(
            ("max_completion_tokens", "max_tokens", "n_predict"),
            ("max_tokens",),
            ("max_output_tokens",),
            ("num_predict",),
            stand_ins={UNLIMITED: None},
        ),
    ] = None  # to the end of the context
    temperature: Annotated[
        float,
        Option("0 is greedy.", ("--temp", "--temperature"), default_text="the model's own, else 0"),
        Range(0.0, 100.0),
        Requests(("temperature",), ("temperature",)),
    ] = 0.0
    top_k: Annotated[
        int,
        Option("Keep the k most likely tokens; 0 keeps all.", ("--top-k",), default_text="the model's own, else 0"),
        Range(0, 2**31),
        Requests(("top_k",), ("top_k",), stand_ins={-1: 0}),
    ] = 0
    top_p: Annotated[
        float,
        Option(
            "Keep the smallest set of tokens with this total probability.",
            ("--top-p",),
            default_text="the model's own, else 1",
        ),
        Range(0.0, 1.0, excludes_least=True),
        Requests(("top_p",), ("top_p",)),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(
            "Drop tokens less likely than this fraction of the most likely one.",
            ("--min-p",),
            default_text="the model's own, else 0",
        ),
        Range(0.0, 1.0),
        Requests(("min_p",)),
    ] = 0.0
    repeat_penalty: Annotated[
        float,
        Option(
            "Above 1, makes tokens that have already appeared less likely.",
            ("--repeat-penalty",),
            default_text="the model's own, else 1",
        ),
        Range(0.01, 100.0),
        Requests(("repeat_penalty", "repetition_penalty")),
    ] = 1.0  # divides positive logits, multiplies others (arXiv 1909.05858)
    seed: Annotated[
        int,
        Option("The same seed gives the same text.", ("-s", "--seed"), default_text="random"),
        Range(0, 2**64 - 1),
        Requests(("seed",), ("seed",), stand_ins={RANDOM: None}),
    ] = 0  # prompts generated together use different noise, by their index
    stop: Annotated[
        tuple[str, ...],
        Option(
            "End the text before this string; can be given more than once.",
            ("--stop", "-r", "--reverse-prompt"),
            typed=list[str],
        ),
        Requests(("stop",), ("stop_sequences",)),
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...],
        Option("More tokens that end the text, next to the model's own."),
        Requests(("stop_token_ids",)),
    ] = ()
    ignore_eos: Annotated[
        bool,
        Option("The model's end tokens don't end the text.", ("--ignore-eos",), default_text="false"),
        Requests(("ignore_eos",)),
    ] = False
    logprobs: Annotated[
        int | None,
        Option("Return each token's log-probability, and those of up to this many likeliest tokens."),
        Range(0, MAX_LOGPROBS),
    ] = None
    presence_penalty: Annotated[
        float,
        Option(
            "Subtracted from the logit of every token that occurs in the text; the prompt does not count.",
            ("--presence-penalty",),
        ),
        Range(-2.0, 2.0),
        Requests(("presence_penalty",)),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option("Subtracted from a token's logit for each time the token occurs in the text.", ("--frequency-penalty",)),
        Range(-2.0, 2.0),
        Requests(("frequency_penalty",)),
    ] = 0.0
    logit_bias: Annotated[
        Pairs,
        Option(
            "Added to a token's logit after the penalties, like 15043+1 or 15043-1.5; can be given more than once.",
            ("-l", "--logit-bias"),
            typed=list[str],
            metavar="ID+BIAS",
        ),
        Requests(("logit_bias",)),
    ] = ()
    json_schema: Annotated[
        str | None,
        Option(
            "Generate only JSON that matches this JSON Schema. Needs the extra [server].",
            ("-j", "--json-schema"),
            file_flags=("-jf", "--json-schema-file"),
        ),
    ] = None
    grammar: Annotated[
        str | None,
        Option(
            "Generate only text that matches this grammar: Lark, as in llguidance, or GBNF.",
            ("--grammar",),
            file_flags=("--grammar-file",),
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, option in SAMPLING.items():
            value = getattr(self, name)
            if option.kind in SIMPLE_KINDS and not (value is None and name in NOT_NEEDED):
                option.check(value)
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "json_schema", _as_schema(self.json_schema))
        if not isinstance(self.grammar, str | None):
            raise SAMPLING["grammar"].refusal(self.grammar)
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError(SAMPLING["json_schema"], " and ", SAMPLING["grammar"], " are both given; leave one out.")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_stop(stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        for token_id in self.stop_token_ids:
            TOKEN_ID.check(token_id, called=SAMPLING["stop_token_ids"])

    @property
    def is_filtered(self) -> bool:
        """Whether sampling excludes some tokens (top_k, top_p or min_p)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or a bias change the model's logits."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repeat_penalty != 1 or any(penalties) or bool(self.logit_bias)

    @property
    def is_constrained(self) -> bool:
        """Whether a JSON schema or a grammar decides which tokens may follow."""
        return self.json_schema is not None or self.grammar is not None

    def require_known(self, vocab_size: int) -> None:
        known = replace(TOKEN_ID, most=vocab_size - 1)
        for token_id, _ in self.logit_bias:
            _check_bias_token(token_id, known)

    @classmethod
    def read(cls, sampling: Any) -> Self:
        """Convert a SamplingParams, a GenerationConfig, or a dictionary with fields of both, to SamplingParams.

        In a dictionary, a temperature without do_sample means to sample.

        Raises:
            UsageError: if a value is out of range, or a name is neither transformers' nor ours.
        """
        if isinstance(sampling, cls):
            return sampling
        if not isinstance(sampling, Mapping):
            return cls.from_hf(sampling)
        from transformers import GenerationConfig

        theirs = GenerationConfig().to_dict()
        own = {name: value for name, value in sampling.items() if name not in theirs}
        _check_names(own, [*SAMPLING, *theirs])
        return cls.from_hf({"do_sample": bool(sampling.get("temperature"))} | dict(sampling)).changed(**own)

    @classmethod
    def from_hf(cls, generation_config: Any) -> Self:
        """Convert a Hugging Face GenerationConfig (object or dict). Unset fields keep this engine's defaults.

        If top_k is unset, transformers keeps 50 candidates, this engine all of them. End tokens are read elsewhere.

        Raises:
            UsageError: if it requests beams or another unsupported feature.
        """
        if not isinstance(generation_config, Mapping) and not hasattr(generation_config, "to_dict"):
            raise UsageError(f"expected a GenerationConfig or a dict, got {type(generation_config).__name__}.")
        values = generation_config if isinstance(generation_config, Mapping) else generation_config.to_dict()
        if asked := generation_keys.ignored(values):
            raise UsageError(f"the generation configuration asks for {asked}, which is not offered; leave it out.")
        sampled = False if values.get("do_sample") is None else values["do_sample"]
        if not isinstance(sampled, bool):
            raise UsageError(f"do_sample is {shown(sampled)}; expected true or false.")
        chosen: dict[str, Any] = {"temperature": 1.0 if sampled else 0.0}
        names = {"max_new_tokens": "max_new_tokens", "repetition_penalty": "repeat_penalty"}
        if sampled:
            names |= {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        for theirs, ours in names.items():
            if values.get(theirs) is not None:
                chosen[ours] = values[theirs]
        top_k = chosen.get("top_k")
        if top_k == -1 or (isinstance(top_k, float) and top_k.is_integer()):
            chosen["top_k"] = max(0, int(top_k))  # some published files have 20.0, or -1 for all
        return cls(**chosen, stop=() if values.get("stop_strings") is None else values["stop_strings"])

    def changed(self, **changes: Any) -> Self:
        _check_names(changes, SAMPLING)
        return replace(self, **changes)


SAMPLING = options_of(SamplingParams)
NOT_NEEDED = ("max_new_tokens", "logprobs")  # which None leaves open
Sampling = SamplingParams | Mapping[str, Any]  # also a GenerationConfig of transformers


class SamplingChanges(TypedDict, total=False):
    """Keyword arguments that change sampling options, typed for type checkers and editors.

    Some accept more types than `SamplingParams` stores.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int
    stop: str | Collection[str]
    stop_token_ids: Collection[int]
    ignore_eos: bool
    logprobs: int | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Collection[tuple[int, float]]
    json_schema: str | Mapping[str, Any] | None
    grammar: str | None


class ChatChanges(SamplingChanges, total=False):
    """Keyword arguments of `Engine.chat`: sampling options and the chat template."""

    chat_template: str | None


def _check_names(names: Iterable[Any], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{shown(name)} is not a sampling parameter; {meant(str(name), known)}")


def _as_stop(values: Any) -> tuple[str, ...]:
    stop, option = _as_tuple("stop", values), SAMPLING["stop"]
    if len(stop) > MAX_STOP_STRINGS:
        raise UsageError(option, f" holds {len(stop)} strings; expected at most {MAX_STOP_STRINGS}.")
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            expected = f"expected text of 1 to {MAX_STOP_CHARACTERS} characters."
            raise UsageError(option, f" holds {shown(text)}; {expected}")
    return stop


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise UsageError(SAMPLING[name], f" is {shown(values)}; expected a list.")
    return tuple(values)


def _as_schema(value: Any) -> str | None:
    """Return a JSON schema as text. Accepts an object or its JSON text."""
    if value is None:
        return None
    option = SAMPLING["json_schema"]
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(option, f" is {shown(value)}, which is not JSON ({error}).") from error
    if not is_object:
        raise UsageError(option, f" is {shown(value)}; expected a JSON Schema that is an object.")
    return text


def _as_bias(values: Any) -> Pairs:
    """Convert a mapping, or a list of pairs, to pairs of token id and bias. A token's last bias counts."""
    option = SAMPLING["logit_bias"]
    if isinstance(values, Sized) and len(values) > MAX_BIASES:
        raise UsageError(option, f" holds {len(values)} tokens; expected at most {MAX_BIASES}.")
    pairs = tuple(values.items()) if isinstance(values, Mapping) else _as_tuple("logit_bias", values)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(option, f" holds {shown(pair)}; expected pairs of a token id and a number.")
        token_id, bias = pair
        _check_bias_token(token_id, TOKEN_ID)
        if not BIAS.allows(bias):
            raise UsageError(option, f" of token {token_id} is {shown(bias)}; expected {BIAS.expected}.")
    return tuple(dict(pairs).items())


def _check_bias_token(token_id: object, known: Option) -> None:
    if not known.allows(token_id):
        raise UsageError(SAMPLING["logit_bias"], f" token is {shown(token_id)}; expected {known.expected}.")
