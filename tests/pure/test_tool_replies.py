"""Replies that call tools: what their grammar lets through in each format, and what the reader makes of it."""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero_ee.config import demo_model_folder
from hetero_ee.decoding.channels import END as END_OF_MESSAGE
from hetero_ee.decoding.constrained.constraint import Constraint
from hetero_ee.decoding.constrained.grammars import Grammars
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.tools.chat import effort_variables
from hetero_ee.serving.tools.reply import RepeatedCalls
from hetero_ee.serving.tools.reply_grammar import ReplyGrammar
from hetero_ee.serving.tools.reply_reader import ARGUMENTS, CALLED, SAID, THOUGHT, Piece, ReplyReader
from hetero_ee.serving.tools.tool import Tool, ToolUse
from hetero_ee.serving.tools.tool_format import FORMATS, HARMONY, MARKERS, ToolFormat, recognised
from hetero_ee.text.chat_template import Message, ToolCall
from hetero_ee.text.tokenizer import Tokenizer
from tests.chat_support import LINES
from tests.tool_templates import TEMPLATES, THINKING

N_TOKENS, END = 2048, 1
PLACE = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Rome", 'a "quoted\\" }place']},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("weather", "Says how it will be.", PLACE),
    Tool("weather_now", "", {"type": "object", "properties": {}, "additionalProperties": False, "not": {"const": 3}}),
)
NAMES = ("weather", "weather_now")
KINDS = {form.name: form for form, _ in FORMATS if form is not HARMONY}


def use(**changes: Any) -> ToolUse:
    return ToolUse(**{"tools": TOOLS, "callable_names": frozenset(NAMES)} | changes)


class Setting:
    """A tokenizer in which the markers are special tokens, or are not."""

    def __init__(self, *, is_special: bool) -> None:
        self.n_tokens = N_TOKENS + (len(MARKERS) if is_special else 0)
        self.tokenizer = Tokenizer.load(demo_model_folder(), self.n_tokens)
        if is_special:
            self.tokenizer._backend.backend_tokenizer.add_special_tokens(list(MARKERS))
        found = {marker: self.tokenizer.special_token_id(marker) for marker in MARKERS}
        self.special_ids = {marker: token_id for marker, token_id in found.items() if token_id is not None}
        assert len(self.special_ids) == (len(MARKERS) if is_special else 0)
        self.grammars = Grammars(self.tokenizer.as_json, self.n_tokens, [END])
        self.grammar = ReplyGrammar(self.special_ids)

    def constraint(self, text: str) -> Constraint:
        found = self.grammars.constraint(SamplingParams(grammar=text))
        assert found is not None
        return found

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, with_special_tokens=False)

    def text(self, ids: list[int]) -> str:
        """With the markers."""
        return "".join(self.tokenizer.token_text(each) for each in ids)

    def lets(self, grammar: str, text: str) -> str:
        """How the grammar takes a reply: it ends there, may end, has to go on, or is none."""
        held, ids = self.constraint(grammar), self.encode(text)
        for n, token_id in enumerate(ids):
            if not held.allowed(ids[:n])[token_id]:
                return "no"
        return "ends" if held.is_complete(ids) else "may end" if held.allowed(ids)[END] else "goes on"


@pytest.fixture(scope="module", params=["text", "special tokens"])
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(is_special=request.param == "special tokens")


def reply(form: ToolFormat, *calls: tuple[str, str]) -> str:
    written = [form.head + form.named(name) + arguments + form.tail for name, arguments in calls]
    return form.opening + (form.separator or "").join(written) + form.closing


def read(text: str, form: ToolFormat | None, draw: random.Random, **more: Any) -> list[tuple[str, str, int]]:
    """Pieces of the same kind joined, from text that comes in pieces of any length."""
    reader, found, at = ReplyReader(form, NAMES, **more), list[list[Any]](), 0
    pieces = []
    while at < len(text):
        n = draw.choice([1, 2, 3, 7, 30])
        pieces += reader.read(text[at : at + n])
        at += n
    for each in [*pieces, *reader.end()]:
        if found and found[-1][0] == each.kind != CALLED and found[-1][2] == each.index:
            found[-1][1] += each.text
        else:
            found.append([each.kind, each.text, each.index])
    return [(kind, said, index) for kind, said, index in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Hm, 1 < 2. <|start|>assistant<|channel|>final<|message|>Yes, <b>.\n",
            [(THOUGHT, "Hm, 1 < 2.", 0), (SAID, "Yes, <b>.\n", 0)],
        ),
        ("<|channel|>final<|message|>Yes.", [(SAID, "Yes.", 0)]),
        ("<|start|>assistant<|message|>Yes.", [(SAID, "Yes.", 0)]),
        ("<|channel|>analysis<|message|>Cut off <", [(THOUGHT, "Cut off <", 0)]),
        ("<|channel|>analysis<|message|>Cut off<|start|>assistant<|chan", [(THOUGHT, "Cut off", 0)]),
        ("<|channel|>ana", []),
        ("<", [(SAID, "<", 0)]),
        ('{"a": 1}', [(SAID, '{"a": 1}', 0)]),
        ("<b>Yes</b>", [(SAID, "<b>Yes</b>", 0)]),
    ],
)
def test_messages_of_the_channel_analysis_are_thoughts(text: str, expected: list[tuple[str, str, int]]) -> None:
    for seed in range(10):
        assert read(text, None, random.Random(seed), has_channels=True) == expected


ROME = '{"place": "Rome"}'
CALLS_OF_MESSAGES = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.weather<|message|>",
    " to=functions.weather<|channel|>commentary json<|message|>",
)
THOUGHT_FIRST = "<|channel|>analysis<|message|>Hm {1}.<|end|><|start|>assistant"


@pytest.mark.parametrize("head", CALLS_OF_MESSAGES)
def test_messages_call_tools_in_their_heads(setting: Setting, head: str) -> None:
    lets, grammar = setting.lets, setting.grammar.of_messages(use())
    assert lets(grammar, head + ROME) == lets(grammar, THOUGHT_FIRST + head + ROME) == "ends"
    assert lets(grammar, head.replace("weather", "weather_now") + "{}") == "ends"
    assert lets(grammar, head + '{"place": "Oslo"}') == lets(grammar, head.replace("weather", "weth") + "{}") == "no"
    assert lets(grammar, THOUGHT_FIRST + "<|channel|>final<|message|>Yes {") == "may end"
    assert lets(grammar, THOUGHT_FIRST) == lets(grammar, head) == "goes on"
    required = setting.grammar.of_messages(use(is_required=True))
    assert lets(required, THOUGHT_FIRST + head + ROME) == "ends"
    assert lets(required, "<|channel|>final<|message|>Yes") == "no"
    for seed in range(5):
        found = read(
            (THOUGHT_FIRST + head + ROME).replace(END_OF_MESSAGE, ""), HARMONY, random.Random(seed), has_channels=True
        )
        assert found == [(THOUGHT, "Hm {1}.", 0), (CALLED, "weather", 0), (ARGUMENTS, ROME, 0)]


def test_answers_on_channels_match_a_schema(setting: Setting) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = setting.grammar.of_messages(ToolUse(), schema)
    assert setting.lets(grammar, THOUGHT_FIRST + '<|channel|>final<|message|>{"a": 1}') == "ends"
    assert setting.lets(grammar, "<|channel|>final<|message|>So") == setting.lets(grammar, '{"a": 1}') == "no"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_required_call_is_one_whatever_is_drawn(setting: Setting, name: str, parallel: bool) -> None:
    form = KINDS[name]
    grammar = setting.grammar.of_calls(
        use(is_required=True, is_parallel=parallel), form, thinks=False, is_thinking=False
    )
    for seed in range(4):
        draw, held, ids = random.Random(seed), setting.constraint(grammar), list[int]()
        while not held.is_complete(ids):
            ids.append(int(draw.choice(np.flatnonzero(held.allowed(ids)))))
            if ids[-1] == END:
                ids.pop()
                break
        found = read(setting.text(ids), form, draw)
        called = [text for kind, text, _ in found if kind == CALLED]
        assert called and set(called) <= set(NAMES) and (parallel or len(called) == 1)
        for (kind, text, _), (_, tool, _) in zip(found[1::2], found[::2], strict=True):
            assert kind == ARGUMENTS and set(json.loads(text)) <= ({"place", "days"} if tool == "weather" else set())


@pytest.mark.parametrize("name", KINDS)
def test_a_reply_may_say_anything_until_it_calls(setting: Setting, name: str) -> None:
    form = KINDS[name]
    grammar = setting.grammar.of_calls(use(is_parallel=False), form, thinks=False, is_thinking=False)
    called = reply(form, ("weather", '{"place": "Rome"}'))
    assert setting.lets(grammar, "") == "may end"
    assert setting.lets(grammar, "Hello <there>, [you].") == "may end"
    assert setting.lets(grammar, called) == "ends"
    assert setting.lets(grammar, called[:-1]) in ("goes on", "no")  # by how tokens are cut
    assert setting.lets(grammar, reply(form, ("weather", '{"place": "Oslo"}'))) == "no"
    assert setting.lets(grammar, reply(form, ("wheather", "{}"))) == "no"
    assert setting.lets(grammar, f"I look.\n{called}") == ("may end" if form.at_start else "ends")
    two = setting.grammar.of_calls(use(), form, thinks=False, is_thinking=False)
    both = reply(form, ("weather", '{"place": "Rome", "days": 3}'), ("weather_now", "{}"))
    assert form.separator is None or setting.lets(two, both) in ("may end", "ends")


def test_an_answer_may_be_one_or_the_other(setting: Setting) -> None:
    form, answer = KINDS["hermes"], {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = setting.grammar.of_calls(use(is_parallel=False), form, answer, thinks=False, is_thinking=False)
    assert setting.lets(grammar, '{"a": 1}') == "ends" and setting.lets(grammar, "Hello") == "no"
    assert setting.lets(grammar, reply(form, ("weather_now", "{}"))) == "ends"


def test_thoughts_come_before_what_is_asked_for(setting: Setting) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    free = setting.grammar.of_schema(schema, is_thinking=False)
    assert setting.lets(free, '{"a": 1}') == setting.lets(free, '<think>\nSo {"b"}.\n</think>\n\n{"a": 1}') == "ends"
    assert setting.lets(free, "So") == "no"
    begun = setting.grammar.of_schema(schema, is_thinking=True)
    assert setting.lets(begun, 'So.\n</think>\n\n{"a": 1}') == "ends" and setting.lets(begun, "So") == "goes on"
    calls = setting.grammar.of_calls(use(is_required=True), KINDS["hermes"], thinks=True, is_thinking=True)
    assert setting.lets(calls, f"So.</think>\n\n{reply(KINDS['hermes'], ('weather_now', '{}'))}") == "may end"
    odd = setting.grammar.of_schema(schema | {"x-guidance": 5}, is_thinking=True)
    assert setting.lets(odd, 'So.\n</think>\n\n{"a": 1}') == "ends"


@pytest.mark.parametrize("name", KINDS)
def test_thoughts_may_come_before_anything(setting: Setting, name: str) -> None:
    form = KINDS[name]
    called = reply(form, ("weather_now", "{}"))
    for is_thinking, begun in ((True, ""), (False, "<think>\n")):
        grammar = setting.grammar.of_calls(use(is_parallel=False), form, thinks=True, is_thinking=is_thinking)
        thought = f"{begun}So.\n</think>\n\n"
        assert setting.lets(grammar, "Hello") == setting.lets(grammar, f"{thought}Hello") == "may end"
        assert setting.lets(grammar, thought + called) == ("may end" if form.at_start else "ends")


@pytest.mark.parametrize("name", KINDS)
def test_the_reader_tells_calls_from_text(name: str) -> None:
    form = KINDS[name]
    arguments = json.dumps({"place": 'a "quoted\\" }place', "days": 3})
    calls = [("weather", arguments)] + ([("weather_now", "{}")] if form.separator is not None else [])
    wanted = [piece for n, (tool, text) in enumerate(calls) for piece in ((CALLED, tool, n), (ARGUMENTS, text, n))]
    for seed in range(20):
        draw = random.Random(seed)
        assert read(reply(form, *calls), form, draw) == wanted
        if not form.at_start:
            assert read(f"I look <there>.\n\n{reply(form, *calls)}", form, draw) == [
                (SAID, "I look <there>.", 0),
                *wanted,
            ]
        assert read("No [TOOL call <tool_ {at all}.\n", form, draw) == [(SAID, "No [TOOL call <tool_ {at all}.\n", 0)]
        cut = reply(form, ("weather", arguments))[: -len(form.tail + form.closing) - 5]
        assert [kind for kind, _, _ in read(cut, form, draw)] == [CALLED, ARGUMENTS]
        assert read(reply(form, ("weather", "{}"))[: len(form.opening + form.head) + 3], form, draw) == []


def test_the_reader_tells_thoughts_from_text() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        wanted = [(THOUGHT, "So < it\n\nis.", 0), (SAID, "Yes.", 0)]
        assert read("<think>\nSo < it\n\nis.\n</think>\n\nYes.", None, draw, thinks=True) == wanted
        assert read("So < it\n\nis.\n</think>\n\nYes.", None, draw, thinks=True, is_thinking=True) == wanted
        assert read("<thin air", None, draw, thinks=True) == [(SAID, "<thin air", 0)]
        assert read("<think>So", None, draw, thinks=True) == [(THOUGHT, "So", 0)]


def passed(*calls: tuple[str, str]) -> tuple[list[tuple[str, str, int]], bool]:
    """What the filter lets through of calls whose arguments come character by character, and whether it found one."""
    found, repeats = list[tuple[str, str, int]](), RepeatedCalls()
    for index, (name, arguments) in enumerate(calls):
        for piece in (Piece(CALLED, name, index), *(Piece(ARGUMENTS, each, index) for each in arguments)):
            found += [(each.kind, each.text, each.index) for each in repeats.passed(piece)]
    return found, repeats.is_found


def test_a_call_that_repeats_an_earlier_one_is_dropped() -> None:
    rome, oslo = ("weather", '{"place":"Rome"}'), ("weather", '{"place":"Oslo"}')
    once, found = passed(rome)
    assert not found and "".join(text for _, text, _ in once) == "".join(rome)
    assert passed(rome, rome) == passed(rome, rome, oslo) == (once, True)
    both, found = passed(rome, oslo)
    assert not found and "".join(text for _, text, _ in both) == "".join((*rome, *oslo))
    assert passed(rome, oslo, rome) == (both, True)
    assert passed(rome, ("weather", '{"pl')) == (once, False)  # cut while it could be the same
    assert passed(("clock", "{}"), ("clock", '{"a":1}'))[1] is False


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{{ enable_thinking }}", "low", {"enable_thinking": True}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", False, {"enable_thinking": False}),
        (
            "{{ enable_thinking }} {{ reasoning_effort }}",
            "none",
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        ("{{ reasoning_effort }}", True, {}),
        ("{{ enable_thinking }}", None, {}),
        ("{{ messages }}", "high", {}),
        (None, "high", {}),
    ],
    ids=range(9),
)
@pytest.mark.sample(9)
def test_an_effort_becomes_the_variables_that_a_template_has(
    template: str | None, effort: str | bool | None, variables: dict[str, Any]
) -> None:
    assert effort_variables(template, effort) == variables


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_recognised(name: str) -> None:
    found = recognised(TEMPLATES[name])
    assert found is not None and found.name == name


def test_other_templates_are_not() -> None:
    assert recognised(THINKING) is not None
    assert recognised(LINES) is None and recognised("{{ tools }} <function=a>") is None
    assert recognised(TEMPLATES["hermes"].replace("tools", "things")) is None


def test_thoughts_before_a_call_have_the_name_that_gpt_oss_reads() -> None:
    message = Message("assistant", "", (ToolCall("1", "weather", {}),), reasoning="Hm.")
    assert message.as_variable()["thinking"] == message.as_variable()["reasoning_content"] == "Hm."
    for other in (replace(message, content="I look."), replace(message, tool_calls=())):
        assert "thinking" not in other.as_variable()
