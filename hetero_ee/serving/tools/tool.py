"""Reads the tools of a request in OpenAI's and Anthropic's formats, and whether they may be called."""

from dataclasses import dataclass, field
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.serving.protocols.body import Fields

MAX_TOOLS = 512
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can call."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON Schema of its arguments
    is_strict: bool = False  # parts of the schema that can't be enforced are errors

    def as_variable(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and whether a reply may or must call them."""

    tools: tuple[Tool, ...] = ()
    is_required: bool = False  # a call of one of them at least
    is_parallel: bool = True  # whether a reply may have several calls
    callable_names: frozenset[str] = field(default_factory=frozenset)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(each for each in self.tools if each.name in self.callable_names)


def openai_tools(fields: Fields, *, is_flat: bool = False) -> ToolUse:
    """Return the tools of a request. If is_flat, their fields are one level higher, as in /v1/responses.

    Tools that are not functions are dropped: agents send them, but the server can't call them.
    """
    found = []
    for each in _listed(fields):
        if each.text("type") == "function":
            function = each if is_flat else each.inner("function")
            found.append(_tool(function, "parameters", is_strict=function.flag("strict")))
    parallel = fields.values.get("parallel_tool_calls") is None or fields.flag("parallel_tool_calls")
    choice = fields.values.get("tool_choice")
    if isinstance(choice, dict):
        inner = fields.inner("tool_choice")
        if inner.text("type") == "function":
            return _use(fields, found, (inner if is_flat else inner.inner("function")).text("name"))
        fields.refuse("tool_choice", f"is {shown(choice)}; expected none, auto, required or a function's name")
    return _chosen(fields, found, choice, {"none": "none", "auto": "auto", "required": "any"}, parallel)


def anthropic_tools(fields: Fields) -> ToolUse:
    """Return the tools of a request. Tools without a schema are Anthropic's own and are dropped."""
    found = []
    for each in _listed(fields):
        if each.values.get("input_schema") is not None:
            found.append(_tool(each, "input_schema", is_strict=each.flag("strict")))
    choice = fields.inner("tool_choice")
    parallel, kind = not choice.flag("disable_parallel_tool_use"), choice.text("type")
    if kind == "tool":
        return _use(fields, found, choice.text("name"))
    return _chosen(fields, found, kind, {"none": "none", "auto": "auto", "any": "any"}, parallel)


def _listed(fields: Fields) -> list[Fields]:
    found = fields.objects("tools")
    if len(found) > MAX_TOOLS:
        fields.refuse("tools", f"holds {len(found)} tools; expected at most {MAX_TOOLS}")
    return found


def _tool(fields: Fields, schema_name: str, *, is_strict: bool) -> Tool:
    name = fields.text("name")
    if not name:
        fields.refuse("name", "is missing; expected the tool's name")
    schema = fields.inner(schema_name).values or EMPTY
    if schema.get("type") != "object":
        schema = {**schema, "type": "object"}
    return Tool(name, fields.text("description") or "", dict(schema), is_strict)


def _chosen(fields: Fields, found: list[Tool], choice: Any, words: dict[str, str], parallel: bool) -> ToolUse:
    kind = "auto" if choice is None else words.get(choice) if isinstance(choice, str) else None
    if kind is None:
        fields.refuse("tool_choice", f"is {shown(choice)}; expected {', '.join(words)} or a tool's name")
    if kind == "any" and not found:
        fields.refuse("tool_choice", f"is {shown(choice)}, and there is no tool to call")
    if kind == "none":
        return ToolUse()
    return ToolUse(tuple(found), kind == "any", parallel, frozenset(each.name for each in found))


def _use(fields: Fields, found: list[Tool], name: str | None) -> ToolUse:
    """Return the ToolUse for a request that forces one tool: the reply must be exactly one call of it."""
    if name not in {each.name for each in found}:
        fields.refuse("tool_choice", f"names {shown(name)}, which is not among the tools")
    return ToolUse(tuple(found), True, False, frozenset({name or ""}))
