"""The OpenAPI document at /openapi.json, derived from the tables that the server reads and refuses fields by."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee import __version__
from hetero_ee.options.option import IDS, TEXT, Schema
from hetero_ee.options.sampling import MAX_LOGPROBS
from hetero_ee.serving import anthropic, sampling_fields
from hetero_ee.serving.responses import answer as responses
from hetero_ee.serving.sampling_fields import REFUSED, REFUSED_IN_CHATS, REFUSED_IN_TEXTS
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.token_origins import ASKED

FLAG, WHOLE = ({"type": each} for each in ("boolean", "integer"))
PROMPT: Schema = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        IDS | {"minItems": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": IDS | {"minItems": 1}},
    ]
}
PARTS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": TEXT},
    },
}
CONTENT: Schema = {"oneOf": [TEXT, PARTS]}
OPENAI: dict[str, Schema] = sampling_fields.CHATS.schemas() | {
    "model": TEXT,
    "n": WHOLE | {"minimum": 1},
    "stream": FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
    ASKED: FLAG,
}
NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
ARGUMENTS: Schema = {"type": "object", "properties": {"type": {"const": "object"}}, "additionalProperties": False}
FUNCTION: dict[str, Schema] = {"name": NAME, "description": TEXT, "parameters": ARGUMENTS}
CHOICE: dict[str, Schema] = {"tool_choice": {"enum": ["none", "auto"]}}  # others want a tool
FORMS: dict[str, Schema] = {
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object"]}},
    },
    "guided_choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 64},
}


def _tools(**fields: Schema) -> Schema:
    """Return the schema of tools: functions with these fields in addition to their type."""
    tool = {"type": "object", "required": ["type", *fields], "properties": {"type": {"const": "function"}, **fields}}
    return {"type": "array", "items": tool, "maxItems": 512}


CHAT = (
    OPENAI
    | CHOICE
    | FORMS
    | {
        "tools": _tools(function={"type": "object", "required": ["name"], "properties": FUNCTION}),
        "parallel_tool_calls": FLAG,
        "chat_template_kwargs": {"type": "object"},
        "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}},
        "logprobs": FLAG,
        "top_logprobs": WHOLE | {"minimum": 0, "maximum": MAX_LOGPROBS},
    }
)
COMPLETION = (
    OPENAI
    | FORMS
    | {
        "prompt": PROMPT,
        "echo": FLAG,
        "logprobs": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}, {"const": False}]},
    }
)
MESSAGES: dict[str, Schema] = sampling_fields.MESSAGES.schemas() | {
    "model": TEXT,
    "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/AnthropicMessage"}},
    "system": CONTENT,
    "stream": FLAG,
}
COUNTED = ("messages", "system")  # of these, what a prompt's length depends on
RESPONSE: dict[str, Schema] = (
    CHOICE
    | sampling_fields.RESPONSES.schemas()
    | {
        "model": TEXT,
        "input": TEXT,  # or items
        "instructions": TEXT,
        "stream": FLAG,
        "tools": _tools(**FUNCTION),
        "parallel_tool_calls": FLAG,
    }
)
TOKENIZE: dict[str, Schema] = {"content": TEXT, "prompt": TEXT, "add_special": FLAG, "add_special_tokens": FLAG}
ERRORS = ("400", "401", "403", "404", "405", "408", "413", "415", "503", "504")
EVENT: Schema = {"type": "object", "properties": {"data": TEXT, "event": TEXT}}  # of a stream
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


async def document(request: Request, served: ServedModel) -> Response:
    """Answer with the document."""
    return JSONResponse(openapi())


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document with what each path accepts and answers."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "hetero-ee", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": _gets() | _posts(),
        "components": {
            "schemas": {
                "Message": _message("system", "developer", "user", "assistant"),
                "AnthropicMessage": _message("user", "assistant"),
                "Error": _object({"error": {"type": "object", "required": ["message", "type"]}}, "error"),
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # with --api-key alone
    }


def _gets() -> dict[str, Any]:
    models = _object({"object": {"const": "list"}, "data": {"type": "array"}}, "object", "data")
    named = {"name": "name", "in": "path", "required": True, "schema": TEXT}
    said = {
        "/health": ("Whether requests are taken", _object({"status": TEXT, "reason": TEXT}, "status")),
        "/props": ("What it runs, and how", _object({}, "default_generation_settings", "total_slots", "n_layers")),
        "/tokenizer_info": ("Special tokens and chat template", _object({})),
        "/v1/models": ("The one model", models),
    }
    paths = {path: {"get": _operation(summary, schema)} for path, (summary, schema) in said.items()}
    card = _operation("The model by its name", _object({"id": TEXT}, "id")) | {"parameters": [named]}
    paths["/v1/models/{name}"] = {"get": card}
    paths["/metrics"] = {"get": _operation("Counts, as Prometheus reads them", TEXT, "text/plain")}
    return paths


def _posts() -> dict[str, Any]:
    usage = {"type": "object", "required": list(COUNTS), "properties": dict.fromkeys(COUNTS, WHOLE)}
    choices = _object({"choices": {"type": "array", "minItems": 1}, "usage": usage}, "id", "object", "choices", "usage")
    message = _object({"type": {"const": "message"}, "usage": {"type": "object"}}, "id", "content", "usage")
    ids = _object({"tokens": IDS, "count": WHOLE}, "tokens", "count")
    said: dict[str, tuple[str, Schema, Schema]] = {
        "/v1/chat/completions": ("A reply", _asked(CHAT, {**REFUSED, **REFUSED_IN_CHATS}, "messages"), choices),
        "/v1/completions": (
            "A text that goes on",
            _asked(COMPLETION, {**REFUSED, **REFUSED_IN_TEXTS}, "prompt"),
            choices,
        ),
        "/v1/responses": (
            "A response",
            _asked(RESPONSE, responses.REFUSED, "input"),
            _object({"output": {"type": "array"}}, "id", "object", "output", "usage"),
        ),
        "/v1/messages": ("A reply", _asked(MESSAGES, anthropic.REFUSED, "messages", "max_tokens"), message),
        "/v1/messages/count_tokens": (
            "A prompt's length",
            _asked({name: MESSAGES[name] for name in COUNTED}, anthropic.REFUSED, "messages"),
            _object({"input_tokens": WHOLE}, "input_tokens"),
        ),
        "/tokenize": ("Text as tokens", _asked(TOKENIZE, {}), ids),
        "/detokenize": ("Tokens as text", _asked({"tokens": IDS}, {}), _object({"content": TEXT}, "content")),
    }
    paths: dict[str, Any] = {}
    for path, (summary, asked, answer) in said.items():
        body = {"required": True, "content": {"application/json": {"schema": asked}}}
        operation = _operation(summary, answer) | {"requestBody": body}
        if "stream" in asked["properties"]:
            operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": EVENT}
        paths[path] = {"post": operation}
    return paths


def _asked(fields: Mapping[str, Schema], refused: Mapping[str, tuple[Any, ...]], *required: str) -> Schema:
    """Return the schema of a request's body.

    Null counts as absent. Fields that are refused may only have the values that ask for nothing.
    """
    named = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in fields.items() if name not in required}
    nothing = {name: {"enum": [None, *values]} for name, values in refused.items() if name not in fields}
    whole = named | nothing | {name: fields[name] for name in required}
    return _object(whole, *required)


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _message(*roles: str) -> Schema:
    return _object({"role": {"enum": list(roles)}, "content": CONTENT}, "role", "content")


def _operation(summary: str, answer: Schema, media: str = "application/json") -> dict[str, Any]:
    error = {"description": "Why not", "content": {"application/json": {"schema": {"type": "object"}}}}
    done = {"description": "The answer", "content": {media: {"schema": answer}}}
    return {"summary": summary, "responses": {"200": done} | dict.fromkeys(ERRORS, error)}
