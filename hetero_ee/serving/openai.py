"""/v1/chat/completions and /v1/completions, as OpenAI's clients ask and read them."""

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.decoding.logprobs import NO_LOGPROBS
from hetero_ee.errors import HeteroError, shown
from hetero_ee.serving.answers import PING, EventStream, event, until_gone
from hetero_ee.serving.body import Fields, read_body
from hetero_ee.serving.errors import openai_error
from hetero_ee.serving.generation import Generation
from hetero_ee.serving.logprobs import asked_by_chat, asked_by_completion, ids_in, of_chat, of_completion
from hetero_ee.serving.messages import openai_messages
from hetero_ee.serving.sampling_fields import (
    CHAT_NAMES,
    OPENAI_NAMES,
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_TEXTS,
    openai_sampling,
    refuse_unsupported,
)
from hetero_ee.serving.served_model import ServedModel

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one of the two ways names things."""

    id_prefix: str
    whole: str  # `object` of an answer
    piece: str  # `object` of an event
    is_chat: bool

    def choice(self, text: str, logprobs: dict[str, Any] | None, finish_reason: str) -> dict[str, Any]:
        """Of a whole answer."""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        return {"index": 0, **said, "logprobs": logprobs, "finish_reason": finish_reason}

    def delta(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, *, is_first: bool = False
    ) -> dict[str, Any]:
        """Of an event."""
        role = {"role": "assistant"} if is_first else {}
        content = {"content": text} if text or is_first else {}
        said: dict[str, Any] = {"delta": role | content} if self.is_chat else {"text": text}
        return {"index": 0, **said, "logprobs": logprobs, "finish_reason": finish_reason}


CHAT = _Kind("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
TEXT = _Kind("cmpl-", "text_completion", "text_completion", is_chat=False)


async def chat_completions(request: Request, served: ServedModel) -> Response:
    """Raises HeteroError, ClientDisconnect."""
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED, REFUSED_IN_CHATS)
    n_logprobs = _offered(asked_by_chat(fields), fields, served)
    params = openai_sampling(fields, served.usual, n_logprobs, CHAT_NAMES)
    messages, asked = openai_messages(fields), _Asked.of(fields)
    generation = served.generation(await served.chat_ids(messages), params)
    return await _answer(request, _Answer(CHAT, served, asked), generation, served)


async def completions(request: Request, served: ServedModel) -> Response:
    """Raises HeteroError, ClientDisconnect."""
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED, REFUSED_IN_TEXTS)
    n_logprobs = _offered(asked_by_completion(fields), fields, served)
    params, asked = openai_sampling(fields, served.usual, n_logprobs, OPENAI_NAMES), _Asked.of(fields)
    generation = served.generation(await served.prompt_ids(_prompt(fields)), params)
    return await _answer(request, _Answer(TEXT, served, asked), generation, served)


@dataclass(frozen=True, slots=True)
class _Asked:
    """How the answer is to leave."""

    is_stream: bool
    has_usage: bool  # in an event of its own

    @classmethod
    def of(cls, fields: Fields) -> "_Asked":
        fields.text("model")  # whatever its name: there is one
        return cls(fields.flag("stream"), fields.inner("stream_options").flag("include_usage"))


class _Answer:
    """The documents of one answer."""

    def __init__(self, kind: _Kind, served: ServedModel, asked: _Asked) -> None:
        self._kind, self._served, self._asked = kind, served, asked
        name, created_s = served.settings.model_name, int(time.time())
        self._head = {"id": kind.id_prefix + secrets.token_hex(12), "created": created_s, "model": name}

    @property
    def is_stream(self) -> bool:
        return self._asked.is_stream

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """In one document."""
        choice = self._kind.choice(generation.text, await self._logprobs(generation), generation.finish_reason)
        tail = {"usage": _usage(generation), "timings": generation.timings()}
        return {**self._head, "object": self._kind.whole, "choices": [choice], **tail}

    async def events(self, generation: Generation, ping_s: float) -> AsyncIterator[bytes]:
        """Pieces of the text, why it ended, the usage where that was asked for."""
        try:
            if self._kind.is_chat:
                yield self._piece([self._kind.delta("", None, None, is_first=True)])
            async for token in generation.tokens(ping_s):
                if token is None:
                    yield PING
                elif token.text:
                    yield self._piece([self._kind.delta(token.text, await self._logprobs(generation), None)])
        except HeteroError as error:
            yield event(openai_error(error))
            return
        end = self._kind.delta("", await self._logprobs(generation), generation.finish_reason)
        yield self._piece([end], timings=generation.timings())
        if self._asked.has_usage:
            yield self._piece([], usage=_usage(generation))
        yield event(DONE)

    async def _logprobs(self, generation: Generation) -> dict[str, Any] | None:
        """Of the tokens that came since the last time."""
        tokens, generation.placed = generation.placed, []
        if not tokens:
            return None
        texts = await self._served.token_texts(ids_in(tokens))
        return of_chat(tokens, texts) if self._kind.is_chat else of_completion(tokens, texts)

    def _piece(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._asked.has_usage else {}
        return event({**self._head, "object": self._kind.piece, "choices": choices, **usage, **more})


async def _answer(request: Request, answer: _Answer, generation: Generation, served: ServedModel) -> Response:
    if answer.is_stream:
        return EventStream(answer.events(generation, served.settings.ping_s), generation)
    await until_gone(request, generation.finish())
    return JSONResponse(await answer.whole(generation))


def _offered(n_logprobs: int | None, fields: Fields, served: ServedModel) -> int | None:
    """The same. Raises RequestError where this model's mode has no log-probabilities."""
    if n_logprobs is not None and served.engine.exits is not None:
        fields.refuse("logprobs", f"is {shown(fields.values['logprobs'])}; {NO_LOGPROBS}", code="unsupported_parameter")
    return n_logprobs


def _prompt(fields: Fields) -> Any:
    """Text, or a list of token ids; a list of one prompt is that one."""
    prompt = fields.values.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            fields.refuse("prompt", f"holds {len(prompt)} prompts; send one a request, they run side by side")
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        fields.refuse("prompt", "is missing; expected text, or a list of token ids")
    return prompt


def _usage(generation: Generation) -> dict[str, Any]:
    n_prompt, n_tokens = generation.n_prompt_tokens, generation.n_tokens
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.n_cached_tokens},
    }
