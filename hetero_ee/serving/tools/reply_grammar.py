"""Grammars, in llguidance's dialect of Lark, of replies that may call tools, or think before they match a schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

from hetero_ee.decoding.channels import ANALYSIS, CHANNEL, CONSTRAIN, END, MESSAGE, START, THINK, THINK_END
from hetero_ee.decoding.constrained.grammars import JSON_STYLE
from hetero_ee.serving.tools.tool import ToolUse
from hetero_ee.serving.tools.tool_format import RECIPIENT, ToolFormat

TEXT = r"TEXT: /(.|\n)*/"


class ReplyGrammar:
    """Writer of grammars. `special_ids` has the markers that are special tokens of this model and thus have no text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._split = re.compile("|".join(f"({re.escape(each)})" for each in special_ids)) if special_ids else None

    def of_calls(
        self,
        use: ToolUse,
        form: ToolFormat,
        answer: Mapping[str, Any] | None = None,
        *,
        thinks: bool,
        is_thinking: bool,
    ) -> str:
        """Return the grammar of a reply that may call tools.

        A required call comes first; otherwise the reply is free text until the format's trigger. `answer` is the schema
        of a reply without calls. Thoughts may precede both if `thinks`, or if the prompt has begun them
        (`is_thinking`).
        """
        tools = use.callable_tools
        calls = self._literal((form.opening + form.head).removeprefix(form.trigger)) + " body"
        if use.is_parallel and form.separator is not None:
            calls += f" ({self._literal(form.separator + form.head)} body)*"
        calls += " " + self._literal(form.closing)
        trigger = self._literal(form.trigger)
        rules = [TEXT, "body: " + " | ".join(f"body_{n}" for n in range(len(tools)))]
        if use.is_required or answer is not None:
            thought, more = self._thought(thinks=thinks, is_thinking=is_thinking)
            other = "" if use.is_required or answer is None else f" | %json {_styled(answer)}"
            rules += [f"start: {thought} ({trigger} {calls}{other})", *more]
        else:
            rules += self._free_rules(form, calls, is_thought=thinks or is_thinking)
        for n, tool in enumerate(tools):
            rules.append(f"body_{n}: {self._literal(form.named(tool.name))} args_{n} {self._literal(form.tail)}")
        return "\n".join(rules + _arguments(use)) + "\n"

    def of_messages(self, use: ToolUse, answer: Mapping[str, Any] | None = None) -> str:
        """Return the grammar of a reply of gpt-oss: messages, the last of which is a call or the answer.

        A call names its tool before or after its channel, as the model writes it. `answer` is the answer's schema.
        """
        final = "TEXT" if answer is None else f"%json {_styled(answer)}"
        last = [] if use.is_required else [f"{self._literal(f'{CHANNEL}final{MESSAGE}')} {final}"]
        for n, tool in enumerate(use.callable_tools):
            name = _quoted(RECIPIENT + tool.name)
            last.append(f"({name} channel COMMENTARY | channel COMMENTARY {name}) form args_{n}")
        rules = [
            f'start: (channel ("{ANALYSIS}" | COMMENTARY) {self._literal(MESSAGE)} said)* ({" | ".join(last)})',
            f"said: thought {self._literal(f'{START}assistant')}",
            f"form: (/ ?/ {self._literal(CONSTRAIN)} / ?(json)?/ | / (json)?/)? {self._literal(MESSAGE)}",
            f"channel: {self._literal(CHANNEL)}",
            'COMMENTARY: "commentary"',
            self._up_to(END),
        ]
        return "\n".join([*rules, TEXT, *_arguments(use)]) + "\n"

    def of_schema(self, schema: Mapping[str, Any], *, is_thinking: bool) -> str:
        """Return the grammar of a reply that thinks, or continues to if is_thinking, and then matches the schema."""
        thought, more = self._thought(thinks=True, is_thinking=is_thinking)
        return "\n".join([TEXT, f"start: {thought} %json {_styled(schema)}", *more]) + "\n"

    def _free_rules(self, form: ToolFormat, calls: str, *, is_thought: bool) -> list[str]:
        """Return the rules of a reply that is free text until the trigger. Markers with a token id are not text."""
        trigger, text = self._literal(form.trigger), "OTHER?" if form.at_start else "TEXT"
        marks = [self._literal(each) for each in (THINK, THINK_END) if is_thought and each in self._special_ids]
        start = f"start: ({text} ({' | '.join(marks)}))* " if marks else "start: "
        if form.at_start:
            return [f"{start}({trigger} {calls} | OTHER?)", rf"OTHER: /[^{form.trigger[0]}](.|\n)*/"]
        if form.trigger in self._special_ids:
            return [f"{start}(TEXT | TEXT {trigger} {calls})"]
        return [f"{start}(TEXT | trigger {calls})", f"trigger[lazy]: TEXT {trigger}"]

    def _thought(self, *, thinks: bool, is_thinking: bool) -> tuple[str, list[str]]:
        if not thinks:
            return "", []
        begin = "thought BLANK" if is_thinking else f"({self._literal(THINK)} thought BLANK)?"
        return begin, [self._up_to(THINK_END), r"BLANK: /\n{0,2}/"]

    def _up_to(self, end: str) -> str:
        return f"thought{'' if end in self._special_ids else '[lazy]'}: TEXT {self._literal(end)}"

    def _literal(self, text: str) -> str:
        """Return `text` as a literal in which special tokens are given by their ids."""
        parts = [text] if self._split is None else [each for each in self._split.split(text) if each]
        return " ".join(
            f"<[{self._special_ids[each]}]>" if each in self._special_ids else _quoted(each) for each in parts
        )


def _arguments(use: ToolUse) -> list[str]:
    """Return a rule per tool. Keywords that can't be enforced are dropped unless the tool is strict."""
    return [
        f"args_{n}: %json {_styled(tool.parameters, lenient=not tool.is_strict)}"
        for n, tool in enumerate(use.callable_tools)
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _styled(schema: Mapping[str, Any], **style: Any) -> str:
    own = schema.get("x-guidance")  # llguidance ignores one that is not an object, too
    return json.dumps({**schema, "x-guidance": JSON_STYLE | style | (own if isinstance(own, dict) else {})})
