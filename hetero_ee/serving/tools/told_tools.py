"""Tools for chat templates without tool support: described in the system message, with calls and results as text."""

import json
from collections.abc import Sequence
from dataclasses import replace

from hetero_ee.serving.tools.tool import Tool, ToolUse
from hetero_ee.serving.tools.tool_format import HERMES
from hetero_ee.text.chat_template import Message, ToolCall


def told(messages: Sequence[Message], use: ToolUse) -> list[Message]:
    """Return the conversation with tools, calls and results written as text."""
    found: list[Message] = []
    for each in messages:
        if each.role == "tool":
            result = f"<tool_response>\n{each.content}\n</tool_response>"
            if found and found[-1].role == "user" and found[-1].content.endswith("</tool_response>"):
                found[-1] = replace(found[-1], content=f"{found[-1].content}\n{result}")
            else:
                found.append(Message("user", result))
        elif each.tool_calls:
            calls = "\n".join(map(_call, each.tool_calls))
            text = f"{each.content}\n{calls}" if each.content else calls
            found.append(Message("assistant", text))
        else:
            found.append(each)
    if not use.tools:
        return found
    explained = _explained(use.tools)
    if found and found[0].role == "system":
        return [replace(found[0], content=f"{found[0].content}\n\n{explained}"), *found[1:]]
    return [Message("system", explained), *found]


def _explained(tools: Sequence[Tool]) -> str:
    described = "\n".join(json.dumps(each.as_variable(), ensure_ascii=False) for each in tools)
    return (
        f"These are functions, each described by JSON:\n{described}\n\nTo call one, write\n"
        f"{HERMES.head}NAME{HERMES.middle}ARGUMENTS{HERMES.tail}\n"
        "with its name and a JSON object of its arguments; the result comes in the next message."
    )


def _call(call: ToolCall) -> str:
    return HERMES.head + HERMES.named(call.name) + json.dumps(call.arguments, ensure_ascii=False) + HERMES.tail
