"""Sampling: which token follows, from logits and from noise that depends on the position alone.

Gumbel-max: argmax(logits / temperature + g), g = -log(-log(u)), draws from softmax(logits / temperature). The noise of
a position is a function of (seed, sequence, position), so it does not matter how, or in which batch, the tokens before
it were computed: a draft can later be checked against the very token that the full model draws. Derived.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.decoding import generation_keys
from hetero_ee.errors import HeteroError, UsageError, meant, shown
from hetero_ee.runtime.choice import Noise, all_finite, gumbel_noise, tempered

Allowed = NDArray[np.bool_]  # (vocab,), by token id
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000
MAX_LOGPROBS = 20
MAX_RUNS = 500  # of equal scores that are put in order one by one: half the time of sorting 32,000 again


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises UsageError for values that make no sense."""

    max_new_tokens: int | None = None  # None generates to the end of the context
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # candidates kept, 0 for all
    top_p: float = 1.0  # smallest set of candidates with this probability, 1 for all
    min_p: float = 0.0  # least probability relative to the best candidate's, 0 for all
    repeat_penalty: float = 1.0  # of tokens in prompt or text: divides positive logits, multiplies others (1909.05858)
    seed: int = 0  # 0 to 2^64 - 1; of prompts generated together each has noise of its own, by its index
    stop: tuple[str, ...] = ()  # strings that end the text and are not part of it
    stop_token_ids: tuple[int, ...] = ()  # tokens that end it, beside the model's own
    ignore_eos: bool = False  # the model's end tokens don't end the text
    logprobs: int | None = None  # 0 to 20: each token's log-probability, and so many likeliest ones'; None for none
    presence_penalty: float = 0.0  # -2 to 2, taken from the logit of every token that the text has, not the prompt
    frequency_penalty: float = 0.0  # the same, times how often the text has it (OpenAI's)
    logit_bias: tuple[tuple[int, float], ...] = ()  # of token ids, -100 to 100, added to their logits last of all
    json_schema: str | None = None  # the text is JSON that keeps to this JSON Schema, itself JSON text or an object
    grammar: str | None = None  # the text keeps to this grammar: Lark's, as llguidance has it, or GBNF

    def __post_init__(self) -> None:
        _require_whole("max_new_tokens", self.max_new_tokens, 1, 2**31, optional=True)
        _require_whole("top_k", self.top_k, 0, 2**31)
        _require_whole("seed", self.seed, 0, 2**64 - 1)
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("repeat_penalty", self.repeat_penalty, 0.01, 100.0)
        _require_flag("ignore_eos", self.ignore_eos)
        _require_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "json_schema", _as_schema(self.json_schema))
        if not isinstance(self.grammar, str | None):
            raise UsageError(f"grammar is {shown(self.grammar)}; expected text.")
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError("json_schema and grammar are both given; a text keeps to one of them.")
        object.__setattr__(self, "stop", _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise UsageError(f"stop holds {len(self.stop)} strings; expected at most {MAX_STOP_STRINGS}.")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise UsageError(f"stop holds {shown(text)}; expected text of 1 to {MAX_STOP_CHARACTERS} characters.")
        for token_id in self.stop_token_ids:
            _require_whole("stop_token_ids", token_id, 0, 2**31)

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens can't be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def changes_logits(self) -> bool:
        """Whether some tokens' logits are others than the model's: by tokens before them, or by a bias."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repeat_penalty != 1 or any(penalties) or bool(self.logit_bias)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says which tokens may follow."""
        return self.json_schema is not None or self.grammar is not None

    def require_known(self, vocab_size: int) -> None:
        """Raises UsageError for a bias of a token that the model does not have."""
        for token_id, _ in self.logit_bias:
            _require_whole("logit_bias token", token_id, 0, vocab_size - 1)

    @classmethod
    def read(cls, sampling: Any) -> Self:
        """These themselves, a GenerationConfig, or a dictionary of its fields and ours; a temperature alone means to
        sample. Raises UsageError, also for a name that is neither's.
        """
        if isinstance(sampling, cls):
            return sampling
        if not isinstance(sampling, Mapping):
            return cls.from_hf(sampling)
        from transformers import GenerationConfig

        theirs = GenerationConfig().to_dict()
        own = {name: value for name, value in sampling.items() if name not in theirs}
        _check_names(own, [*SamplingChanges.__annotations__, *theirs])
        return cls.from_hf({"do_sample": bool(sampling.get("temperature"))} | dict(sampling)).changed(**own)

    @classmethod
    def from_hf(cls, generation_config: Any) -> Self:
        """Reads a Hugging Face GenerationConfig (object or dict); unset fields keep our defaults.

        transformers keeps 50 candidates where top_k is unset, we keep all. End tokens are the engine's to read. Raises
        UsageError, for beams and whatever else is not offered too.
        """
        if not isinstance(generation_config, Mapping) and not hasattr(generation_config, "to_dict"):
            raise UsageError(f"expected a GenerationConfig or a dict, got {type(generation_config).__name__}.")
        values = generation_config if isinstance(generation_config, Mapping) else generation_config.to_dict()
        if asked := generation_keys.ignored(values):
            raise UsageError(f"the generation configuration asks for {asked}, which is not offered; leave it out.")
        sampled = False if values.get("do_sample") is None else values["do_sample"]
        _require_flag("do_sample", sampled)
        chosen: dict[str, Any] = {"temperature": 1.0 if sampled else 0.0}
        names = {"max_new_tokens": "max_new_tokens", "repetition_penalty": "repeat_penalty"}
        if sampled:
            names |= {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        for theirs, ours in names.items():
            if values.get(theirs) is not None:
                chosen[ours] = values[theirs]
        top_k = chosen.get("top_k")
        if top_k == -1 or (isinstance(top_k, float) and top_k.is_integer()):
            chosen["top_k"] = max(0, int(top_k))  # files in the wild say 20.0, and -1 for all
        return cls(**chosen, stop=() if values.get("stop_strings") is None else values["stop_strings"])

    def changed(self, **changes: Any) -> Self:
        """A copy with some values changed. Raises UsageError for a name that is not a field."""
        _check_names(changes, SamplingChanges.__annotations__)
        return replace(self, **changes)


Sampling = SamplingParams | Mapping[str, Any]  # also a GenerationConfig of transformers


class SamplingChanges(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments, for editors and type checkers."""

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


def choose_token(
    logits: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    sequence: int,
    position: int,
    noise: Noise | None = None,
    n_prompt_tokens: int = 0,
    allowed: Allowed | None = None,
) -> int:
    """The token at `position`: (vocab,) fp32 logits, every token id before it, -> id. The lowest id wins a tie.

    noise: gumbel_noise, from who may have it already. n_prompt_tokens: of the history, the first ones. allowed: the
    tokens to choose from, one at least; None for all.
    Raises HeteroError for logits that are not finite: whatever came out would be noise.
    """
    if not all_finite(logits):
        raise HeteroError(f"the model's logits at position {position} are not finite; its weights may be damaged.")
    if params.temperature == 0:
        scores = _only(allowed, _changed(logits, history, params, n_prompt_tokens))
        return int(scores.numpy(force=True).argmax())  # NumPy's argmax takes a tenth of the time of torch's
    noisy = filtered_scores(logits, history, params, n_prompt_tokens, allowed)
    noisy += (noise or gumbel_noise)(len(noisy), params.seed, sequence, position)
    return int(noisy.numpy().argmax())


class RememberedNoise:
    """gumbel_noise of drafts' positions, each computed once: where a draft is chosen, then where its token is."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int, int], Tensor] = {}

    def of_draft(self, n_tokens: int, seed: int, sequence: int, position: int) -> Tensor:
        """As gumbel_noise; kept."""
        key = n_tokens, seed, sequence, position
        if key not in self._kept:
            self._kept[key] = gumbel_noise(*key)
        return self._kept[key]

    def close(self, sequence: int) -> None:
        """The sequence has ended; what was kept for it goes."""
        self._kept = {key: noise for key, noise in self._kept.items() if key[2] != sequence}

    def of_token(self, n_tokens: int, seed: int, sequence: int, position: int) -> Tensor:
        """As gumbel_noise; kept no longer."""
        key = n_tokens, seed, sequence, position
        return self._kept.pop(key) if key in self._kept else gumbel_noise(*key)


def filtered_scores(
    logits: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    n_prompt_tokens: int = 0,
    allowed: Allowed | None = None,
) -> Tensor:
    """float64 (vocab,) of whose softmax choose_token draws at temperature > 0; -inf for tokens that are left out."""
    scores = _only(allowed, _changed(logits, history, params, n_prompt_tokens))
    return _filtered(tempered(scores, params.temperature), params)


def _only(allowed: Allowed | None, scores: Tensor) -> Tensor:
    """-inf for the others. Before temperature and filters, which are then those of the tokens that may follow."""
    if allowed is None:
        return scores
    return scores.cpu().masked_fill(torch.from_numpy(~allowed), -math.inf)


def _changed(logits: Tensor, history: Sequence[int], params: SamplingParams, n_prompt_tokens: int) -> Tensor:
    """The repeat penalty first, then what is added, so that an added amount is as large as it says."""
    if not params.changes_logits:
        return logits
    added = dict(params.logit_bias)
    if params.presence_penalty or params.frequency_penalty:
        for token_id, count in Counter(history[n_prompt_tokens:]).items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            added[token_id] = added.get(token_id, 0.0) - penalty
    scores = _penalized(logits, history, params.repeat_penalty)
    ids = torch.tensor(list(added), dtype=torch.int64)
    return scores.index_add(0, ids, torch.tensor(list(added.values()), dtype=scores.dtype))


def _penalized(logits: Tensor, history: Sequence[int], penalty: float) -> Tensor:
    if penalty == 1 or not history:
        return logits
    seen = torch.tensor(sorted(set(history)))
    chosen = logits[seen]
    return logits.index_put((seen,), torch.where(chosen > 0, chosen / penalty, chosen * penalty))


def _filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """-inf for every token that top-k, then top-p, then min-p leave out; ties at the edge go to the lowest ids."""
    n_kept = len(scores) if params.top_k == 0 else min(params.top_k, len(scores))
    if n_kept == len(scores) and params.top_p == 1 and params.min_p == 0:
        return scores
    order = torch.from_numpy(best_first(scores.numpy(), n_kept))
    values = scores[order]
    probabilities = torch.softmax(values, 0)
    if params.top_p < 1:
        before = torch.cumsum(probabilities, 0) - probabilities  # what better candidates already cover
        n_kept = max(1, int((before < params.top_p).sum()))
        values, order = values[:n_kept], order[:n_kept]
        probabilities = torch.softmax(values, 0)
    kept = order[probabilities >= params.min_p * probabilities[0]]
    return torch.full_like(scores, -math.inf).index_copy(0, kept, scores[kept])


def best_first(scores: NDArray[np.float64], n_kept: int) -> NDArray[np.int64]:
    """Ids of the n_kept greatest, the greatest first, of equals the lowest id.

    NumPy's quick partition and quick sort, which don't keep the order of equals, and what puts that right: a tenth of
    the time of a stable sort of everything.
    """
    n_left_out = len(scores) - n_kept
    if n_left_out > 0:
        edge = np.partition(scores, n_left_out)[n_left_out]
        ids = np.flatnonzero(scores >= edge)
        return ids[np.argsort(-scores[ids], kind="stable")[:n_kept]]
    order = np.argsort(-scores)
    ordered = scores[order]
    is_equal = np.concatenate(([False], ordered[1:] == ordered[:-1], [False]))  # to the one before
    edges = np.flatnonzero(is_equal[1:] != is_equal[:-1])  # where runs of equals begin, and their last places
    if len(edges) > 2 * MAX_RUNS:
        return np.argsort(-scores, kind="stable")
    for first, last in edges.reshape(-1, 2):
        order[first : last + 1].sort()
    return order


def _check_names(names: Iterable[Any], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{shown(name)} is not a sampling parameter; {meant(str(name), known)}")


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise UsageError(f"{name} is {shown(values)}; expected a list.")
    return tuple(values)


def _as_schema(value: Any) -> str | None:
    """The JSON text of an object, or text that is one."""
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"json_schema is {shown(value)}, which is no JSON ({error}).") from error
    if not is_object:
        raise UsageError(f"json_schema is {shown(value)}; expected a JSON Schema that is an object.")
    return text


def _as_bias(values: Any) -> tuple[tuple[int, float], ...]:
    """Pairs, of a mapping or of pairs; a token's last one counts."""
    pairs = tuple(values.items()) if isinstance(values, Mapping) else _as_tuple("logit_bias", values)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(f"logit_bias holds {shown(pair)}; expected pairs of a token id and a number.")
        _require_whole("logit_bias token", pair[0], 0, 2**31)
        _require_number(f"logit_bias of token {pair[0]}", pair[1], -100.0, 100.0)
    return tuple(dict(pairs).items())


def _require_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {shown(value)}; expected true or false.")


def _require_whole(name: str, value: Any, low: int, high: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} is {shown(value)}; expected a whole number from {low} to {high}.")


def _require_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):  # NaN fails every comparison
        edge = "above" if open_low else "from"
        raise UsageError(f"{name} is {shown(value)}; expected a number {edge} {low:g} to {high:g}.")
