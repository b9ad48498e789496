"""Formats in which replies write tool calls. A new format is an entry of FORMATS."""

import json
from dataclasses import dataclass

from hetero_ee.decoding.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START, THINK, THINK_END


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of calls: `head`, the tool's name, `middle`, its arguments as a JSON object, and `tail`."""

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
        """Return the text of a call from the tool's name up to its arguments."""
        return json.dumps(tool, ensure_ascii=False)[1:-1] + self.middle


CALL, CALLS = "<tool_call>", "[TOOL_CALLS]"
HERMES = ToolFormat("hermes", CALL, CALL + '\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")
LLAMA = ToolFormat("llama", '{"name": "', '{"name": "', '", "parameters": ', "}", at_start=True)
MISTRAL_ARGS = ToolFormat("mistral with [ARGS]", CALLS, CALLS, "[ARGS]", "", separator="", short_ids=True)
MISTRAL = ToolFormat(
    *("mistral", CALLS, '{"name": "', '", "arguments": ', "}"),
    opening=CALLS + "[",
    separator=", ",
    closing="]",
    short_ids=True,
)
RECIPIENT = " to=functions."  # before a tool's name, in the head of a message
HARMONY = ToolFormat("harmony", CHANNEL, f"{CHANNEL}commentary{RECIPIENT}", f" {CONSTRAIN}json{MESSAGE}", "")
# What a template has to hold, all of it, the first that does; see docs/server.md.
FORMATS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (HARMONY, (CHANNEL, "functions.")),
    (MISTRAL_ARGS, (CALLS, "[ARGS]")),
    (MISTRAL, (CALLS,)),
    (HERMES, (CALL, '"arguments"')),
    (HERMES, (CALL, "arguments | tojson")),
    (LLAMA, ('"parameters"', "ipython")),
)
MARKERS = (THINK, THINK_END, CALL, "</tool_call>", CALLS, "[ARGS]", CHANNEL, MESSAGE, START, END, CONSTRAIN)


def recognised(template: str) -> ToolFormat | None:
    """Return the format of calls that this chat template describes, or None if it is not in FORMATS."""
    if "tools" not in template or "<function=" in template:
        return None
    return next((found for found, signs in FORMATS if all(sign in template for sign in signs)), None)
