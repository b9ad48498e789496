"""The OpenAPI document at /openapi.json, derived from the tables with which the server reads and refuses fields."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee import __version__
from hetero_ee.options.option import IDS, TEXT, Schema
from hetero_ee.options.sampling import MAX_LOGPROBS
from hetero_ee.serving.models import Models
from hetero_ee.serving.protocols import anthropic, llama_server, ollama, responses, sampling_fields
from hetero_ee.serving.protocols.openai import ORIGINS
from hetero_ee.serving.protocols.sampling_fields import REFUSED, REFUSED_IN_CHATS, REFUSED_IN_TEXTS
from hetero_ee.serving.protocols.slot_actions import ACTIONS


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    bounds = {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
    return {"type": "array", "items": items, **bounds}


def _tools(**fields: Schema) -> Schema:
    """Return the schema of a list of tools, which are functions with these fields in addition to their type."""
    return _array(_object({"type": {"const": "function"}, **fields}, "type", *fields), most=512)


FLAG, WHOLE = ({"type": each} for each in ("boolean", "integer"))
WORDS, SOME_IDS, TOP = TEXT | {"minLength": 1}, IDS | {"minItems": 1}, WHOLE | {"minimum": 0, "maximum": MAX_LOGPROBS}
PROMPT: Schema = {"oneOf": [WORDS, SOME_IDS, _array(WORDS, 1), _array(SOME_IDS, 1)]}
CONTENT: Schema = {"oneOf": [TEXT, _array(_object({"type": {"const": "text"}, "text": TEXT}, "type", "text"))]}
ASKED: dict[str, Schema] = {"model": TEXT, "stream": FLAG}
FORMS: dict[str, Schema] = {
    "response_format": _object({"type": {"enum": ["text", "json_object"]}}, "type"),
    "guided_choice": _array(WORDS, most=64),
}
OPENAI: dict[str, Schema] = {
    **sampling_fields.CHATS.schemas(),
    **ASKED,
    **FORMS,
    "n": WHOLE | {"minimum": 1},
    "stream_options": _object({"include_usage": FLAG}),
    ORIGINS: FLAG,
}
FUNCTION: dict[str, Schema] = {
    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
    "description": TEXT,
    "parameters": {"type": "object", "properties": {"type": {"const": "object"}}, "additionalProperties": False},
}
CHOICE: dict[str, Schema] = {
    "tool_choice": {"enum": ["none", "auto"]},
    "parallel_tool_calls": FLAG,
}  # others want a tool
CHAT: dict[str, Schema] = {
    **OPENAI,
    **CHOICE,
    "tools": _tools(function=_object(FUNCTION, "name")),
    "chat_template_kwargs": {"type": "object"},
    "reasoning_effort": TEXT,
    "messages": _array({"$ref": "#/components/schemas/Message"}, 1),
    "logprobs": FLAG,
    "top_logprobs": TOP,
}
COMPLETION: dict[str, Schema] = {
    **OPENAI,
    "prompt": PROMPT,
    "echo": FLAG,
    "logprobs": {"oneOf": [TOP, {"const": False}]},
}
COUNTED: dict[str, Schema] = {  # fields that affect the length of a message's prompt
    "messages": _array({"$ref": "#/components/schemas/AnthropicMessage"}, 1),
    "system": CONTENT,
}
MESSAGES: dict[str, Schema] = {**sampling_fields.MESSAGES.schemas(), **ASKED, **COUNTED}
RESPONSE: dict[str, Schema] = {
    **sampling_fields.RESPONSES.schemas(),
    **ASKED,
    **CHOICE,
    "input": TEXT,  # or items
    "instructions": TEXT,
    "reasoning": _object({"effort": TEXT}),
    "tools": _tools(**FUNCTION),
}
TEMPLATED: dict[str, Schema] = {  # fields that affect a chat's prompt
    name: CHAT[name] for name in ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
}
LLAMA: dict[str, Schema] = {
    **sampling_fields.TEXTS.schemas(),
    **ASKED,
    **FORMS,
    "prompt": {"oneOf": [WORDS, SOME_IDS]},
    "return_tokens": FLAG,
}
OLLAMA: dict[str, Schema] = {
    **ASKED,
    "options": _object(sampling_fields.OPTIONS.schemas()),
    "format": {"oneOf": [{"enum": ["", "json"]}, {"type": "object", "maxProperties": 0}]},  # also a JSON Schema
    "think": {"oneOf": [FLAG, TEXT]},
}
OLLAMA_CHAT: dict[str, Schema] = {**OLLAMA, "messages": CHAT["messages"], "tools": CHAT["tools"]}
OLLAMA_PROMPT: dict[str, Schema] = {**OLLAMA, "prompt": TEXT, "system": TEXT, "raw": FLAG}
TOKENIZE: dict[str, Schema] = {"content": TEXT, "prompt": TEXT, "add_special": FLAG, "add_special_tokens": FLAG}
ERRORS = ("400", "401", "403", "404", "405", "408", "413", "415", "503", "504")
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


async def document(request: Request, models: Models) -> Response:
    return JSONResponse(openapi())


def openapi() -> dict[str, Any]:
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
    said = {
        "/health": _operation("Whether requests are taken", _object({"status": TEXT, "reason": TEXT}, "status")),
        "/props": _operation(
            "What it runs, and how", _object({}, "default_generation_settings", "total_slots", "n_layers")
        ),
        "/tokenizer_info": _operation("Special tokens and chat template", _object({})),
        "/v1/models": _operation("The models", models),
        "/v1/models/{name}": _operation("A model by its name", _object({"id": TEXT}, "id")),
        "/slots": _operation("What runs in each slot", _array(_object({"id": WHOLE}, "id", "is_processing"))),
        "/api/tags": _operation("The models, for ollama's clients", _object({"models": {"type": "array"}}, "models")),
        "/api/ps": _operation("The loaded ones", _object({"models": {"type": "array"}}, "models")),
        "/api/version": _operation("The version of ollama's API", _object({"version": TEXT}, "version")),
        "/metrics": _operation("Counts, as Prometheus reads them", TEXT, "text/plain"),
    }
    said["/v1/models/{name}"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    for path in ("/props", "/tokenizer_info", "/slots"):
        said[path]["parameters"] = [{"name": "model", "in": "query", "schema": TEXT}]
    return {path: {"get": operation} for path, operation in said.items()}


def _posts() -> dict[str, Any]:
    usage = _object(dict.fromkeys(COUNTS, WHOLE), *COUNTS)
    choices = _object({"choices": _array({}, 1), "usage": usage}, "id", "object", "choices", "usage")
    message = _object({"type": {"const": "message"}, "usage": {"type": "object"}}, "id", "content", "usage")
    response = _object({"output": {"type": "array"}}, "id", "object", "output", "usage")
    ids = _object({"tokens": IDS, "count": WHOLE}, "tokens", "count")
    done, slot = _object({"success": FLAG}, "success"), _object({"id_slot": WHOLE}, "id_slot")
    chat, text = (
        _asked(CHAT, REFUSED | REFUSED_IN_CHATS, "messages"),
        _asked(COMPLETION, REFUSED | REFUSED_IN_TEXTS, "prompt"),
    )
    ollama_chat, ollama_prompt = (_asked(each, ollama.REFUSED) for each in (OLLAMA_CHAT, OLLAMA_PROMPT))
    part = _object({"done": FLAG}, "model", "created_at", "done")
    counted = _asked(COUNTED, anthropic.REFUSED, "messages")
    said: dict[str, tuple[str, Schema, Schema]] = {
        "/v1/chat/completions": ("A reply", chat, choices),
        "/v1/completions": ("A completion", text, choices),
        "/v1/responses": ("A response", _asked(RESPONSE, responses.REFUSED, "input"), response),
        "/v1/messages": ("A reply", _asked(MESSAGES, anthropic.REFUSED, "messages", "max_tokens"), message),
        "/v1/messages/count_tokens": ("A prompt's length", counted, _object({"input_tokens": WHOLE}, "input_tokens")),
        "/completion": (
            "A completion, for llama-server's clients",
            _asked(LLAMA, REFUSED | llama_server.REFUSED_HERE, "prompt"),
            _object({"content": TEXT, "stop": FLAG}, "content", "stop", "timings"),
        ),
        "/apply-template": (
            "The prompt of a chat",
            _asked(TEMPLATED, REFUSED | REFUSED_IN_CHATS, "messages"),
            _object({"prompt": TEXT}, "prompt"),
        ),
        "/api/chat": ("A reply, for ollama's clients", ollama_chat, part),
        "/api/generate": ("A completion, for ollama's clients", ollama_prompt, part),
        "/api/show": (
            "The model's shape",
            _asked({"model": TEXT, "name": TEXT}, {}),
            _object({}, "model_info", "capabilities"),
        ),
        "/tokenize": ("Text as tokens", _asked(TOKENIZE, {}), ids),
        "/detokenize": ("Tokens as text", _asked({"tokens": IDS}, {}), _object({"content": TEXT}, "content")),
        "/slots/{number}": ("A slot saved, restored or erased", _asked({"filename": TEXT}, {}), slot),
        "/models/unload": ("A model closed", _asked({"model": TEXT}, {}, "model"), done),
    }
    paths: dict[str, Any] = {}
    for path, (summary, asked, answer) in said.items():
        body = {"required": True, "content": {"application/json": {"schema": asked}}}
        operation = _operation(summary, answer) | {"requestBody": body}
        if "stream" in asked["properties"]:
            events = {"text/event-stream": {"type": "object", "properties": {"data": TEXT, "event": TEXT}}}
            kinds = {ollama.LINES_TYPE: answer} if path.startswith("/api/") else events
            operation["responses"]["200"]["content"] |= {kind: {"schema": each} for kind, each in kinds.items()}
        paths[path] = {"post": operation}
    number = {"name": "number", "in": "path", "required": True, "schema": TEXT}
    action = {"name": "action", "in": "query", "required": True, "schema": {"enum": [*ACTIONS]}}
    paths["/slots/{number}"]["post"]["parameters"] = [number, action]
    return paths


def _asked(fields: Mapping[str, Schema], refused: Mapping[str, tuple[Any, ...]], *required: str) -> Schema:
    """Return the schema of a request's body. Null fields count as absent.

    Args:
        refused: Unsupported fields, and the neutral values that are still accepted.
        required: Names of the required fields.
    """
    named = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in fields.items() if name not in required}
    nothing = {name: {"enum": [None, *values]} for name, values in refused.items() if name not in fields}
    return _object(named | nothing | {name: fields[name] for name in required}, *required)


def _message(*roles: str) -> Schema:
    return _object({"role": {"enum": list(roles)}, "content": CONTENT}, "role", "content")


def _operation(summary: str, answer: Schema, media: str = "application/json") -> dict[str, Any]:
    error = {"description": "Why not", "content": {"application/json": {"schema": {"type": "object"}}}}
    done = {"description": "The answer", "content": {media: {"schema": answer}}}
    return {"summary": summary, "responses": {"200": done} | dict.fromkeys(ERRORS, error)}
