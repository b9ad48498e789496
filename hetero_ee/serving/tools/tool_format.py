"""The formats in which replies write tool calls. A new one is an entry of FORMATS."""

import json
from dataclasses import dataclass

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls: `head`, the tool's name, `middle`, its arguments as a JSON object, and `tail`."""

    name: str
    trigger: str  # from here on a reply is a call; opening and head begin with it
    head: str
    middle: str
    tail: str
    opening: str = ""  # before the first call
    separator: str | None = None  # between two calls; None: one is all
    closing: str = ""  # after the last
    at_start: bool = False  # the trigger counts as a reply's beginning alone
    short_ids: bool = False  # the template wants ids of calls of 9 letters and digits

    def named(self, tool: str) -> str:
        """Return the part of a call from the tool's name to its arguments."""
        return json.dumps(tool, ensure_ascii=False)[1:-1] + self.middle


HERMES = ToolFormat(
    "hermes",
    trigger="<tool_call>",
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    separator="\n",
)
LLAMA = ToolFormat(
    "llama", trigger='{"name": "', head='{"name": "', middle='", "parameters": ', tail="}", at_start=True
)
MISTRAL = ToolFormat(
    "mistral",
    trigger="[TOOL_CALLS]",
    opening="[TOOL_CALLS][",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    separator=", ",
    closing="]",
    short_ids=True,
)
MISTRAL_ARGS = ToolFormat(
    "mistral with [ARGS]",
    trigger="[TOOL_CALLS]",
    head="[TOOL_CALLS]",
    middle="[ARGS]",
    tail="",
    separator="",
    short_ids=True,
)
# What a template has to hold, all of it, the first that does; see docs/server.md.
FORMATS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (HERMES, ("<tool_call>", '"arguments"')),
    (HERMES, ("<tool_call>", "arguments | tojson")),
    (LLAMA, ('"parameters"', "ipython")),
)
MARKERS = (THINK, THINK_END, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")


def recognised(template: str) -> ToolFormat | None:
    """Return the format of calls that this chat template describes, or None if it has none that we know."""
    if "tools" not in template or "<function=" in template:
        return None
    return next((found for found, signs in FORMATS if all(sign in template for sign in signs)), None)
