"""Chat templates: the text that transformers makes, and one sentence for a template that does what it must not."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_ee.errors import ModelError
from hetero_ee.text.chat_template import RENDERER, ChatTemplate, Message, RenderingLimits
from tests.chat_support import LINES, MISTRAL, STYLES

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = Message("user", " Hi <b> & 'you' {{ 7 * 7 }} {% endfor %} \n")
REPLY = Message("assistant", "Hello,\n  é 👩 ")
SYSTEM = Message("system", "Be brief. ")
CONVERSATIONS = {
    "one message": [USER],
    "a turn and a message": [USER, REPLY, Message("user", "<|im_end|> and </s>?")],
    "with a system message": [SYSTEM, USER],
    "two turns": [SYSTEM, USER, REPLY, USER, Message("assistant", ""), Message("user", "\x00\u2028")],
    "two users": [USER, USER],
}
Open = Callable[..., ChatTemplate]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes templates and closes them."""
    made: list[ChatTemplate] = []

    def make(source: str, **limits: Any) -> ChatTemplate:
        made.append(ChatTemplate(source, SPECIAL_TOKENS, RenderingLimits(**limits)))
        return made[-1]

    yield make
    for template in made:
        template.close()


@pytest.fixture(scope="module")
def reference(demo: Path) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast.from_pretrained(demo)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


# The text.


@pytest.mark.parametrize("style", STYLES)
def test_the_text_is_that_of_transformers(opened: Open, reference: Any, style: str) -> None:
    template = opened(STYLES[style])
    n_texts = 0
    for messages in CONVERSATIONS.values():
        listed = [{"role": message.role, "content": message.content} for message in messages]
        try:
            expected = reference.apply_chat_template(
                listed, chat_template=STYLES[style], tokenize=False, add_generation_prompt=True
            )
        except Exception as refusal:
            with pytest.raises(ModelError) as refused:
                template.render(messages)
            assert f"refuses these messages: {refusal}." in str(refused.value)
        else:
            assert template.render(messages) == expected
            n_texts += 1
    assert n_texts >= 2


def test_what_messages_hold_is_never_a_template(opened: Open) -> None:
    content = "{{ 1/0 }}{% raw %}{% include 'x' %}{{ bos_token }}"
    template = opened(LINES)
    assert template.render([Message(content, content)]) == f"<s>{content}: {content}\nassistant:"
    assert template.render([Message("user", "plain")]) == "<s>user: plain\nassistant:"


def test_turns_share_one_process_that_ends_with_it(opened: Open) -> None:
    before = set(children())
    template = opened(LINES)
    assert set(children()) == before  # none before there is something to render
    for _ in range(3):
        template.render([USER])
    (child,) = set(children()) - before
    assert os.getsid(child.pid) == child.pid  # a Ctrl-C in the terminal does not reach it
    loaded = {Path(mapped.path).name for mapped in child.memory_maps()}
    assert not any("torch" in name for name in loaded)
    template.close()
    template.close()
    assert not child.is_running()
    assert template.render([USER]).startswith("<s>user:")


# What a template must not do.


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% if", "line 1: "),
        ("a\n{{ b }}\n{% endfor %}", "line 3: "),
        ("{% include 'secret' %}", "can't be used"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ raise_exception('two\nlines\x1b[31m') }}", "refuses these messages: two."),
        ("{{ raise_exception('red \x1b[31m') }}", r"refuses these messages: red \x1b[31m."),
        ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{{ ''['__class__'].mro() }}", "unsafe"),
        ("{{ '{0.__class__.__name__}'.format(1) }}", "unsafe"),
        ("{{ messages | map(attribute='__class__') | list | first }}{{ (messages|attr('pop'))() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "__class__"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "_x"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 'x' * 10**10 }}", "too much memory"),
        ("{{ messages[0].content * 10**10 }}", "too much memory"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "more than 1048"),
        ("{{ 'x' * 2**21 }}", "more than 1048"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 9000 + ")" * 9000 + " }}", "can't be used"),
        ("{{ '\\ud800' }}", "not valid Unicode at character 0"),
        ("{{ 9 ** (9 ** 9) }}", "takes longer than 1 s"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "takes longer than 1 s",
        ),
        ("x" * (2**20 + 1), "1048577 characters"),
    ],
    ids=range(27),
)
def test_a_bad_template_is_one_sentence(opened: Open, source: str, sentence: str) -> None:
    before = set(children())
    with pytest.raises(ModelError) as refused:
        template = opened(source, seconds=1.0)
        template.render([USER])
    message = str(refused.value)
    assert sentence in message and message.isprintable() and len(message) < 400
    if "takes longer" in sentence:
        assert set(children()) == before


def test_a_template_that_took_too_long_may_do_better_the_next_time(opened: Open) -> None:
    source = "{% if messages[0].content == 'loop' %}{{ 9 ** (9 ** (messages[0].content | length + 5)) }}{% endif %}done"
    template = opened(source, seconds=0.5)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"longer than 0\.5 s"):
            template.render([Message("user", "loop")])
        assert template.render([USER]) == "done"


def test_a_process_that_died_is_replaced(opened: Open) -> None:
    before = set(children())
    template = opened(LINES)
    template.render([USER])
    (child,) = set(children()) - before
    child.kill()
    child.wait()
    assert template.render([USER]).startswith("<s>user:")


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="this system has no alarms")
def test_the_process_ends_by_itself_where_nobody_is_left_to_end_it() -> None:
    request = {"template": "{{ 9 ** (9 ** 9) }}", "variables": {}, "seconds": 0.2, "characters": 9}
    command = [sys.executable, "-P", str(RENDERER), str(2**29)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"{}\n"
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        assert process.wait(timeout=30) == -signal.SIGALRM


def test_ctrl_c_ends_the_rendering_and_its_process(opened: Open) -> None:
    before = set(children())
    template = opened("{{ 9 ** (9 ** 9) }}", seconds=20.0)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        template.render([USER])
    assert time.monotonic() - begun_s < 10
    assert set(children()) == before


def test_alternation_is_the_templates_to_demand(opened: Open) -> None:
    with pytest.raises(ModelError, match="Roles must take turns"):
        opened(MISTRAL).render([SYSTEM, USER])
