"""Paths of llama-server's own API for text: /completion, /apply-template and /slots."""

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.decoding.result import FinishReason
from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.answers import PING, answered, event, until_gone
from hetero_ee.serving.errors import openai_error
from hetero_ee.serving.models import Models
from hetero_ee.serving.protocols.openai import read_chat
from hetero_ee.serving.protocols.sampling_fields import ONE, REFUSED, REFUSED_IN_CHATS, TEXTS, read_request
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.chat import asked_form, constrained
from hetero_ee.serving.tools.reply import Reply

REFUSED_HERE: dict[str, tuple[Any, ...]] = {"n_cmpl": ONE, "image_data": ([],), "multimodal_data": ([],)}


async def completion(request: Request, served: ServedModel) -> Response:
    fields = await read_request(request, served.settings, REFUSED, REFUSED_HERE)
    params = TEXTS.read(fields, served.usual, served.engine.spec.vocab_size)
    form, prompt = asked_form(fields), fields.values.get("prompt")
    if not isinstance(prompt, str | list):
        fields.refuse("prompt", "is missing; expected text, or a list of token ids")
    is_stream, returns_ids = fields.flag("stream"), fields.flag("return_tokens")
    ping_s = served.settings.ping_s if is_stream else None
    if form is not None:
        params = await until_gone(request, constrained(served, params, form.changes, form.field))
    ids = await served.prompt_ids(prompt)
    text = prompt if isinstance(prompt, str) else await served.decode(ids)
    generation = served.generation(ids, params, keeps_tokens=returns_ids or is_stream)
    head = {"model": served.settings.model_name, "prompt": text, "generation_settings": _settings(params, served)}
    return await answered(request, _Answer(Reply(generation, None), head), [generation], ping_s)


async def apply_template(request: Request, served: ServedModel) -> Response:
    """Answer with the prompt text that the chat template renders for a chat request."""
    fields = await read_request(request, served.settings, REFUSED, REFUSED_IN_CHATS)
    chat = await read_chat(request, fields, served, served.usual)
    return JSONResponse({"prompt": chat.prompt})


async def slots(request: Request, models: Models) -> Response:
    """Answer with the state of each slot, or an empty list if the model is not loaded.

    Unlike in llama-server, prompts and texts are left out, since they belong to other clients.
    """
    served = models.served(models.named(request.query_params.get("model")))
    if served is None:
        return JSONResponse([])
    engine = served.engine
    common = {"n_ctx": engine.context_tokens, "speculative": engine.drafting is not None}
    found = [
        {
            "id": each.number,
            **common,
            "is_processing": each.is_running,
            "n_prompt_tokens": each.n_prompt_tokens,
            "next_token": [{"has_next_token": each.is_running, "n_decoded": each.n_generated}],
        }
        for each in served.scheduler.slot_states()
    ]
    return JSONResponse(found)


def _settings(params: SamplingParams, served: ServedModel) -> dict[str, Any]:
    n_predict = -1 if params.max_new_tokens is None else params.max_new_tokens
    return {**asdict(params), "n_predict": n_predict, "n_ctx": served.engine.context_tokens}


class _Answer:
    """Answer with a completion in llama-server's own format.

    Args:
        head: fields that are known before generation, included in the last event.
    """

    def __init__(self, reply: Reply, head: dict[str, Any]) -> None:
        self._reply, self._generation, self._head = reply, reply.generation, head

    async def whole(self) -> dict[str, Any]:
        await self._reply.finish()
        return self._part(self._reply.content) | self._end()

    async def events(self, ping_s: float) -> AsyncIterator[bytes]:
        """Yield an event for each piece of text, and last one with the statistics and no text."""
        try:
            async for piece in self._reply.pieces(ping_s):
                yield PING if piece is None else event(self._part(piece.text))
        except HeteroError as error:
            yield event(openai_error(error))
            return
        yield event(self._part("") | self._end())

    def _part(self, text: str) -> dict[str, Any]:
        """Return the fields of an event. `tokens` has the ids since the previous event if the request keeps tokens."""
        kept, self._generation.kept = self._generation.kept, []
        return {
            "index": 0,
            "content": text,
            "tokens": [each.token_id for each in kept],
            "id_slot": self._generation.slot_number,
            "stop": False,
            "tokens_predicted": self._generation.n_tokens,
            "tokens_evaluated": self._generation.n_prompt_tokens,
        }

    def _end(self) -> dict[str, Any]:
        generation = self._generation
        word = "eos" if generation.stopped_by is None else "word"
        return {
            **self._head,
            "stop": True,
            "has_new_line": "\n" in generation.text,
            "truncated": False,
            "stop_type": word if generation.reason is FinishReason.STOP else "limit",
            "stopping_word": generation.stopped_by or "",
            "tokens_cached": generation.n_cached_tokens,
            "timings": generation.timings(),
        }
