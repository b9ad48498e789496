"""Where tokens came from, as a request may ask for it by `return_token_origins`: an extension of this server's own."""

from collections.abc import Sequence
from typing import Any

from hetero_ee.decoding.result import FULL_MODEL, GeneratedToken, TokenOrigin

ASKED = "return_token_origins"  # the request's field


def of_tokens(tokens: Sequence[GeneratedToken], n_layers: int) -> dict[str, Any]:
    """Beside what a choice says: an object for each of its tokens, whose texts joined are the text."""
    return {"token_origins": [_said(each, each.origin or TokenOrigin(FULL_MODEL, n_layers)) for each in tokens]}


def _said(token: GeneratedToken, origin: TokenOrigin) -> dict[str, Any]:
    """step_index and n_drafted: its place in the draft-verify step that brought it, and the drafts of that step."""
    place = {"step_index": origin.index, "n_drafted": origin.n_drafted}
    return {"token_id": token.token_id, "text": token.text, "origin": origin.name, "depth": origin.depth, **place}
