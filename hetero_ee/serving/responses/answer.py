"""/v1/responses, whole or streamed, in OpenAI's format."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hetero_ee.decoding.result import FinishReason
from hetero_ee.errors import HeteroError
from hetero_ee.serving.answers import PING, EventStream, event, until_gone
from hetero_ee.serving.body import Fields, read_body
from hetero_ee.serving.errors import openai_error
from hetero_ee.serving.generation import Generation
from hetero_ee.serving.responses.items import messages_of
from hetero_ee.serving.responses.output import COMPLETED, INCOMPLETE, Output
from hetero_ee.serving.sampling_fields import RESPONSES, refuse_unsupported
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.chat import Chat, Form, prepared
from hetero_ee.serving.tools.form_fields import schema_form
from hetero_ee.serving.tools.said import Said, pieces_of
from hetero_ee.serving.tools.tool import openai_tools

REFUSED: dict[str, tuple[Any, ...]] = {  # as in sampling_fields.py
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "top_logprobs": (0,),
}


async def responses(request: Request, served: ServedModel) -> Response:
    """Answer a request of /v1/responses, whole or streamed.

    Raises:
        HeteroError: if the request is refused or fails.
        ClientDisconnect: if the client is gone.
    """
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED)
    fields.text("model")  # any name is accepted: there is one model
    params = RESPONSES.read(fields, served.usual, served.engine.spec.vocab_size)
    is_stream, messages, use = fields.flag("stream"), messages_of(fields), openai_tools(fields, is_flat=True)
    chat = await until_gone(request, prepared(served, messages, params, use, _form(fields)))
    generation = served.generation(chat.prompt_ids, chat.params)
    answer = _Answer(fields, served, chat, generation)
    if is_stream:
        return EventStream(answer.stream(served.settings.ping_s), [generation])
    document = await until_gone(request, answer.whole(), [generation])
    # In ASCII, like events: echoed parts of the request may hold half a character.
    return Response(json.dumps(document), media_type="application/json")


def _form(fields: Fields) -> Form | None:
    asked = fields.inner("text").inner("format")
    return schema_form(asked, asked.values.get("type"), asked, "text.format") if asked.values else None


class _Answer:
    """One response."""

    def __init__(self, fields: Fields, served: ServedModel, chat: Chat, generation: Generation) -> None:
        self._chat, self._generation, self._output, self._said = chat, generation, Output(), Said()
        values, self._n_events = fields.values, 0
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": served.settings.model_name,
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "metadata": values.get("metadata") or {},
            "parallel_tool_calls": values.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": chat.params.temperature,
            "text": values.get("text") or {"format": {"type": "text"}},
            "tool_choice": values.get("tool_choice") or "auto",
            "tools": values.get("tools") or [],
            "top_p": chat.params.top_p,
            "truncation": "disabled",
        }

    async def whole(self) -> dict[str, Any]:
        """Return the response as one document."""
        async for pieces in pieces_of(self._generation, self._chat, self._said):
            for each in pieces or ():
                list(self._output.add(each, self._said))
        list(self._output.end(is_whole=self._is_whole))
        return self._document(self._status)

    async def stream(self, ping_s: float) -> AsyncIterator[bytes]:
        """Yield the response as numbered events."""
        yield self._event({"type": "response.created", "response": self._document("in_progress")})
        yield self._event({"type": "response.in_progress", "response": self._document("in_progress")})
        try:
            async for pieces in pieces_of(self._generation, self._chat, self._said, ping_s):
                if pieces is None:
                    yield PING
                for piece in pieces or ():
                    for each in self._output.add(piece, self._said):
                        yield self._event(each)
        except HeteroError as error:
            told = openai_error(error)["error"]
            failed = self._document("failed") | {"error": {"code": "server_error", "message": told["message"]}}
            yield self._event({"type": "response.failed", "response": failed})
            return
        for each in self._output.end(is_whole=self._is_whole):
            yield self._event(each)
        yield self._event({"type": f"response.{self._status}", "response": self._document(self._status)})

    @property
    def _is_whole(self) -> bool:
        return self._generation.reason is FinishReason.STOP

    @property
    def _status(self) -> str:
        return COMPLETED if self._is_whole else INCOMPLETE

    def _event(self, told: dict[str, Any]) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return event({**told, "sequence_number": number}, told["type"])

    def _document(self, status: str) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        has_ended = status in (COMPLETED, INCOMPLETE)
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": self._output.items if has_ended else [],
            "usage": self._usage() if has_ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return {
            "input_tokens": generation.n_prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.n_cached_tokens},
            "output_tokens": generation.n_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": generation.n_prompt_tokens + generation.n_tokens,
        }
