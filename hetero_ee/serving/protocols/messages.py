"""Reads the messages of a conversation in the formats of OpenAI, Anthropic and ollama."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.protocols.body import Fields, json_in
from hetero_ee.text.chat_template import Message, ToolCall

OPENAI_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ANTHROPIC_ROLES = {"user": "user", "assistant": "assistant"}
OTHERS_CALLS = "calls of other things than tools are not offered; leave it out"
THOUGHTS = ("thinking", "redacted_thinking")


def openai_messages(fields: Fields) -> list[Message]:
    return with_tool_names([_openai_message(one) for one in _each(fields)])


def anthropic_messages(fields: Fields) -> list[Message]:
    """Return the messages of an Anthropic request, starting with the system message if there is one."""
    messages = [message for one in _each(fields) for message in _anthropic_message(one)]
    if messages and messages[-1].role == "assistant":
        fields.refuse("messages", "ends with the assistant's; a reply that has begun already can't be continued here")
    system = [] if fields.values.get("system") is None else [Message("system", text_of(fields, "system"))]
    return with_tool_names([*(each for each in system if each.content), *messages])


def ollama_messages(fields: Fields) -> list[Message]:
    """Return the messages of an ollama request. Without call ids, each tool result belongs to the next open call."""
    found, open_ids = list[Message](), list[str]()
    for number, one in enumerate(_each(fields)):
        one.refuse_unless("images", ([],), "this server supports text only")
        message = _openai_message(one)
        calls = tuple(replace(each, id=each.id or f"call_{number}_{n}") for n, each in enumerate(message.tool_calls))
        open_ids += [each.id for each in calls]
        message = replace(message, tool_calls=calls, reasoning=one.text("thinking"), name=one.text("tool_name"))
        if message.role == "tool" and message.tool_call_id is None and open_ids:
            message = replace(message, tool_call_id=open_ids.pop(0))
        found.append(message)
    return with_tool_names(found)


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the tool's name added to each tool result, which some templates need."""
    names = {call.id: call.name for each in messages for call in each.tool_calls}
    return [
        replace(each, name=names.get(each.tool_call_id or "")) if each.role == "tool" and each.name is None else each
        for each in messages
    ]


def tool_call(fields: Fields, call_id: str | None, arguments: Any) -> ToolCall:
    name = fields.text("name")
    if not name:
        fields.refuse("name", "is missing; expected the name of the tool that was called")
    if isinstance(arguments, str):
        try:
            arguments = json_in(arguments or "{}")
        except ValueError as error:
            fields.refuse("arguments", f"is {shown(arguments)}, which is not JSON ({error})")
    if not isinstance(arguments, dict):
        fields.refuse("arguments", f"is {shown(arguments)}; expected a JSON object")
    return ToolCall(call_id or "", name, arguments)


def text_of(fields: Fields, name: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a string, or of a list of text parts whose types are among `kinds`."""
    content = fields.values.get(name)
    if isinstance(content, str):
        return _valid(content, name)
    if not isinstance(content, list):
        fields.refuse(name, f"is {shown(content)}; expected a string, or a list of parts that are text")
    parts = fields.objects(name)
    for part in parts:
        if part.values.get("type") not in kinds:
            part.refuse("type", f"is {shown(part.values.get('type'))}; this server supports text only")
    return _valid("".join(part.text("text") or "" for part in parts), name)


def _each(fields: Fields) -> list[Fields]:
    found = fields.objects("messages")
    if not found:
        fields.refuse("messages", "is empty; expected one message at least")
    return found


def _role(fields: Fields, roles: dict[str, str]) -> str:
    role = fields.text("role")
    if role not in roles:
        fields.refuse("role", f"is {shown(role)}; expected {', '.join(roles)}")
    return roles[role]


def _openai_message(fields: Fields) -> Message:
    role = _role(fields, OPENAI_ROLES)
    for name in ("function_call", "audio"):
        fields.refuse_unless(name, ([], {}), OTHERS_CALLS)
    if role == "tool":
        return Message(role, text_of(fields, "content"), tool_call_id=fields.text("tool_call_id"))
    if role != "assistant":
        return Message(role, text_of(fields, "content"))
    calls = []
    for each in fields.objects("tool_calls"):
        function = each.inner("function")
        calls.append(tool_call(function, each.text("id"), function.values.get("arguments") or ""))
    has_text = not calls or fields.values.get("content") is not None
    content = text_of(fields, "content") if has_text else ""
    return Message(role, content, tuple(calls), reasoning=fields.text("reasoning_content"))


def _anthropic_message(fields: Fields) -> list[Message]:
    """Convert an Anthropic message. Each tool result in a user's message becomes a message of its own."""
    role, content = _role(fields, ANTHROPIC_ROLES), fields.values.get("content")
    if not isinstance(content, list):
        return [Message(role, text_of(fields, "content"))]
    texts, thoughts = list[str](), list[str]()
    calls, results = list[ToolCall](), list[Message]()
    for part in fields.objects("content"):
        kind = part.values.get("type")
        if kind == "tool_use" and role == "assistant":
            calls.append(tool_call(part, part.text("id"), part.values.get("input") or {}))
        elif kind == "tool_result" and role == "user":
            result = "" if part.values.get("content") is None else text_of(part, "content")
            results.append(Message("tool", result, tool_call_id=part.text("tool_use_id")))
        elif kind in THOUGHTS and role == "assistant":
            thoughts.append(part.text("thinking") or "")
        elif kind == "text":
            texts.append(_valid(part.text("text") or "", "text"))
        else:
            part.refuse("type", f"is {shown(kind)}; this server supports text and tools only")
    said = Message(role, "".join(texts), tuple(calls), reasoning="".join(thoughts) or None)
    is_empty = not (said.content or said.tool_calls) and results
    return results if is_empty else [*results, said]


def _valid(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode at character {error.start}.", name) from error
    return text
