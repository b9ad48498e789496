"""Items of a request's input as messages of a conversation."""

from dataclasses import replace

from hetero_ee.errors import shown
from hetero_ee.serving.body import Fields
from hetero_ee.serving.messages import text_of, tool_call, with_tool_names
from hetero_ee.text.chat_template import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text")


def messages_of(fields: Fields) -> list[Message]:
    """Return the messages in `instructions` and `input`. System messages before the first user message are joined.

    Raises:
        RequestError: if an item is invalid.
    """
    instructions = fields.text("instructions")
    found = [Message("system", instructions)] if instructions else []
    if isinstance(fields.values.get("input"), str):
        found.append(Message("user", text_of(fields, "input")))
    else:
        for each in fields.objects("input"):
            _add(each, found)
    if not any(each.role != "system" for each in found):
        fields.refuse(
            "input", "is missing; expected text, or a list of items, at least one of them not a system message"
        )
    n_system = next(n for n, each in enumerate(found) if each.role != "system")
    told = "\n\n".join(each.content for each in found[:n_system] if each.content)
    return with_tool_names([*([Message("system", told)] if told else []), *found[n_system:]])


def _add(fields: Fields, found: list[Message]) -> None:
    kind = fields.text("type") or "message"
    if kind == "message":
        role = fields.text("role")
        if role not in ROLES:
            fields.refuse("role", f"is {shown(role)}; expected {', '.join(ROLES)}")
        found.append(Message(ROLES[role], text_of(fields, "content", TEXTS)))
    elif kind == "function_call":
        call = tool_call(fields, fields.text("call_id"), fields.values.get("arguments") or "")
        if found and found[-1].role == "assistant":  # text before it, or a parallel call
            found[-1] = replace(found[-1], tool_calls=(*found[-1].tool_calls, call))
        else:
            found.append(Message("assistant", "", (call,)))
    elif kind == "function_call_output":
        found.append(Message("tool", text_of(fields, "output", TEXTS), tool_call_id=fields.text("call_id")))
    elif kind != "reasoning":  # thoughts of earlier turns, which models are not shown again
        fields.refuse("type", f"is {shown(kind)}; expected message, function_call or function_call_output")
