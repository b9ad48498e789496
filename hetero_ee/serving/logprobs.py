"""Log-probabilities in OpenAI's two shapes: lists beside each other for completions, objects for chats."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_ee.decoding.logprobs import TokenLogprobs
from hetero_ee.serving.body import Fields
from hetero_ee.text.text_stream import REPLACEMENT


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and where in its answer it stands."""

    token_id: int
    offset: int  # characters before it
    logprobs: TokenLogprobs | None  # None of a prompt's first


def asked_by_chat(fields: Fields) -> int | None:
    """How many of the likeliest tokens are wanted beside each chosen one, None for nothing. Raises RequestError."""
    n_top = fields.whole("top_logprobs")
    if fields.flag("logprobs"):
        return n_top or 0
    if n_top:
        fields.refuse("top_logprobs", f"is {n_top}; expected `logprobs` true with it")
    return None


def asked_by_completion(fields: Fields) -> int | None:
    """As asked_by_chat."""
    return None if fields.values.get("logprobs") is False else fields.whole("logprobs")


def ids_in(tokens: Iterable[PlacedToken]) -> set[int]:
    """Whose texts the shapes below ask for."""
    return {token_id for each in tokens for token_id in (each.token_id, *(one for one, _ in _top(each)))}


def of_completion(tokens: Sequence[PlacedToken], texts: Mapping[int, str]) -> dict[str, Any]:
    """Lists as long as the tokens. The chosen token is among the likeliest ones always, as clients expect it."""
    return {
        "tokens": [texts[each.token_id] for each in tokens],
        "token_logprobs": [None if each.logprobs is None else each.logprobs.logprob for each in tokens],
        "top_logprobs": [_likeliest(each, texts) for each in tokens],
        "text_offset": [each.offset for each in tokens],
    }


def _top(token: PlacedToken) -> tuple[tuple[int, float], ...]:
    return () if token.logprobs is None else token.logprobs.top


def of_chat(tokens: Sequence[PlacedToken], texts: Mapping[int, str]) -> dict[str, Any]:
    """An object a token."""
    content = []
    for each in tokens:
        if each.logprobs is None:
            continue
        top = [_named(texts[token_id], logprob) for token_id, logprob in each.logprobs.top]
        content.append(_named(texts[each.token_id], each.logprobs.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _likeliest(token: PlacedToken, texts: Mapping[int, str]) -> dict[str, float] | None:
    """By text; of tokens with the same one the likeliest counts."""
    if token.logprobs is None:
        return None
    found: dict[str, float] = {}
    for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
        found.setdefault(texts[token_id], logprob)
    return found


def _named(text: str, logprob: float) -> dict[str, Any]:
    """bytes: None of a token that is a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}
