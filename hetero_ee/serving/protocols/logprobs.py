"""Log-probabilities in OpenAI's two formats: parallel lists for completions, and objects for chats."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_ee.decoding.logprobs import TokenLogprobs
from hetero_ee.serving.protocols.body import Fields
from hetero_ee.text.text_stream import REPLACEMENT


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token with its log-probabilities and its position in the answer's text."""

    token_id: int
    offset: int  # characters before it
    logprobs: TokenLogprobs | None  # None of a prompt's first


def asked_by_chat(fields: Fields) -> int | None:
    """Return the requested number of likeliest tokens per token, or None if log-probabilities are off."""
    n_top = fields.whole("top_logprobs")
    if fields.flag("logprobs"):
        return n_top or 0
    if n_top:
        fields.refuse("top_logprobs", f"is {n_top}; expected `logprobs` true with it")
    return None


def asked_by_completion(fields: Fields) -> int | None:
    """Return the requested number of likeliest tokens per token, or None if log-probabilities are off."""
    return None if fields.values.get("logprobs") is False else fields.whole("logprobs")


def ids_in(tokens: Iterable[PlacedToken]) -> set[int]:
    """Return the token ids whose texts the answer's log-probabilities need."""
    top = {token_id for each in tokens if each.logprobs is not None for token_id, _ in each.logprobs.top}
    return top | {each.token_id for each in tokens}


def of_completion(tokens: Sequence[PlacedToken], texts: Mapping[int, str]) -> dict[str, Any]:
    """Return parallel lists, one entry per token. The likeliest tokens include the chosen one, as clients expect."""
    return {
        "tokens": [texts[each.token_id] for each in tokens],
        "token_logprobs": [None if each.logprobs is None else each.logprobs.logprob for each in tokens],
        "top_logprobs": [_likeliest(each, texts) for each in tokens],
        "text_offset": [each.offset for each in tokens],
    }


def of_chat(tokens: Sequence[PlacedToken], texts: Mapping[int, str]) -> dict[str, Any]:
    content = []
    for each in tokens:
        if each.logprobs is None:
            continue
        top = [_named(texts[token_id], logprob) for token_id, logprob in each.logprobs.top]
        content.append(_named(texts[each.token_id], each.logprobs.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _likeliest(token: PlacedToken, texts: Mapping[int, str]) -> dict[str, float] | None:
    """Return log-probabilities by token text. Among tokens with the same text, the likeliest counts."""
    if token.logprobs is None:
        return None
    found: dict[str, float] = {}
    for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
        found.setdefault(texts[token_id], logprob)
    return found


def _named(text: str, logprob: float) -> dict[str, Any]:
    """Return the object of one token. Its bytes are None if the token is only part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}
