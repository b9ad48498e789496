"""/v1/messages and its count_tokens, as Anthropic's clients ask and read them."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.decoding.result import FinishReason
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.errors import HeteroError
from hetero_ee.serving.answers import EventStream, event, until_gone
from hetero_ee.serving.body import Fields, read_body
from hetero_ee.serving.errors import anthropic_error
from hetero_ee.serving.generation import Generation
from hetero_ee.serving.messages import anthropic_messages
from hetero_ee.serving.sampling_fields import changed, new_seed, refuse_unsupported
from hetero_ee.serving.served_model import ServedModel

REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
    "output_config": ({},),
    "output_format": (),
}


async def messages(request: Request, served: ServedModel) -> Response:
    """Raises HeteroError, ClientDisconnect."""
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED)
    params = _sampling(fields, served.usual)
    fields.text("model")  # whatever its name: there is one
    is_stream, said = fields.flag("stream"), anthropic_messages(fields)
    generation = served.generation(await served.chat_ids(said), params)
    name = served.settings.model_name
    if is_stream:
        return EventStream(_events(generation, name, served.settings.ping_s), [generation])
    await until_gone(request, generation.finish())
    content = [{"type": "text", "text": generation.text}]
    return JSONResponse(_message(name, content, generation) | _stop(generation))


async def count_tokens(request: Request, served: ServedModel) -> Response:
    """Raises HeteroError, ClientDisconnect."""
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED)
    return JSONResponse({"input_tokens": len(await served.chat_ids(anthropic_messages(fields)))})


def _sampling(fields: Fields, usual: SamplingParams) -> SamplingParams:
    length = fields.whole("max_tokens")
    if length is None:
        fields.refuse("max_tokens", "is missing; say how many tokens the reply may have")
    values = {
        "max_new_tokens": length,
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": fields.whole("top_k"),
        "stop": fields.texts("stop_sequences") or None,
        "seed": new_seed() if fields.whole("seed") is None else fields.whole("seed"),  # not Anthropic's
    }
    return changed(usual, values, {"max_new_tokens": "max_tokens", "stop": "stop_sequences"})


async def _events(generation: Generation, model: str, ping_s: float) -> AsyncIterator[bytes]:
    """As Anthropic streams a message of one block of text."""
    try:
        yield _named("message_start", message=_message(model, [], generation))
        yield _named("content_block_start", index=0, content_block={"type": "text", "text": ""})
        async for token in generation.tokens(ping_s):
            if token is None:
                yield _named("ping")
            elif token.text:
                yield _named("content_block_delta", index=0, delta={"type": "text_delta", "text": token.text})
    except HeteroError as error:
        yield event(anthropic_error(error), "error")
        return
    yield _named("content_block_stop", index=0)
    yield _named("message_delta", delta=_stop(generation), usage=_usage(generation))
    yield _named("message_stop")


def _named(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


def _message(model: str, content: list[dict[str, Any]], generation: Generation) -> dict[str, Any]:
    name = f"msg_{secrets.token_hex(12)}"
    head = {"id": name, "type": "message", "role": "assistant", "model": model, "content": content}
    return {**head, "stop_reason": None, "stop_sequence": None, "usage": _usage(generation)}


def _stop(generation: Generation) -> dict[str, Any]:
    if generation.reason is FinishReason.STOP:
        by = generation.stopped_by
        return {"stop_reason": "end_turn" if by is None else "stop_sequence", "stop_sequence": by}
    is_full = generation.reason is FinishReason.CONTEXT
    return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, int]:
    """Cached tokens are not among Anthropic's input tokens. In a stream's first event none is known to be cached."""
    n_cached = generation.n_cached_tokens
    return {
        "input_tokens": generation.n_prompt_tokens - n_cached,
        "output_tokens": generation.n_tokens,
        "cache_read_input_tokens": n_cached,
        "cache_creation_input_tokens": 0,
    }
