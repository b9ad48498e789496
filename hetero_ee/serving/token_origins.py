"""Origins of tokens for the request field `return_token_origins`, an extension of this server."""

from collections.abc import Sequence
from typing import Any

from hetero_ee.decoding.result import FULL_MODEL, GeneratedToken, TokenOrigin

ASKED = "return_token_origins"  # the request's field


def of_tokens(tokens: Sequence[GeneratedToken], n_layers: int) -> dict[str, Any]:
    """Return a choice's additional field: one object per token. Their texts joined are the choice's text."""
    return {"token_origins": [_said(each, each.origin or TokenOrigin(FULL_MODEL, n_layers)) for each in tokens]}


def _said(token: GeneratedToken, origin: TokenOrigin) -> dict[str, Any]:
    """Return one token's object, with its position in its draft-verify step and that step's drafts."""
    place = {"step_index": origin.index, "n_drafted": origin.n_drafted}
    return {"token_id": token.token_id, "text": token.text, "origin": origin.name, "depth": origin.depth, **place}
