"""hetero-ee chat through a pipe: replies on standard output, all else on standard error, one line for what is wrong."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_ee import Engine
from hetero_ee_cli.terminal.chat_input import Command, read_entry
from hetero_ee_profiles.reference import reference_profile
from tests.chat_support import LINES
from tests.command_line import MODE, RATE, Cli, Ended, refused
from tests.emulation import LAPTOP

SAVED = '{"version": 1, "model": "", "sampling": {}, "messages": [%s]}'
PLAIN = ["-t", "1", "--quantizer", "none", "-n", "8"]
COUNTS = (
    rf"\[ prompt (\d+) new \+ (\d+) cached tok, {RATE} \| gen (\d+) tok, {RATE}{MODE} "
    r"\| peak memory [\d.]+ GiB( \| seed \d+)? \]\n"
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a chat template."""
    file = tmp_path_factory.mktemp("templates") / "lines.jinja"
    file.write_text(LINES)
    return file


@pytest.fixture(scope="module")
def replies(tiny: Path) -> list[str]:
    """What the library says to "Hi", and then to "And you?"."""
    with (
        Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine,
        engine.chat("Be brief.", chat_template=LINES, max_new_tokens=8) as chat,
    ):
        return [chat.send(text).finish().text for text in ("Hi", "And you?")]


@pytest.fixture
def chat(cli: Cli, tiny: Path, lines: Path) -> Cli:
    """Runs `hetero-ee chat` with the tiny model; takes what standard input holds, then more arguments."""

    def run(stdin: bytes | str, *arguments: object) -> Ended:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        return cli("chat", tiny, *PLAIN, "--chat-template-file", lines, *arguments, stdin=data)

    return run


# What is printed, and where.


def test_every_line_is_a_turn(chat: Cli, replies: list[str]) -> None:
    for text in (
        "Hi\nAnd you?\n",
        "Hi\r\n\n  \nAnd you?",
        '"""Hi"""\n"""\nAnd you?\n"""\n',
        "Hi\nAnd you?\n/exit\nHi\n",
    ):
        ended = chat(text, "-sys", "Be brief.")
        assert ended.code == 0
        assert ended.out == "".join(f"{reply}\n" for reply in replies)
        assert re.fullmatch(COUNTS * 2, ended.err)
    counts = [tuple(map(int, found[:3])) for found in re.findall(COUNTS, ended.err)]
    assert counts[0][1] == 0 and counts[1][1] > counts[1][0]
    assert [n_generated for _, _, n_generated in counts] == [8, 8]


def test_nothing_in_nothing_out(chat: Cli) -> None:
    for text in ("", "\n\n", "/quit\n"):
        assert chat(text) == Ended(0, "", "")


def test_commands(chat: Cli, replies: list[str]) -> None:
    first, second = replies
    ended = chat("/system Be brief.\nHi\n/clear\n/system\n/system Be brief.\nHi\nAnd you?\n/regen\n/stats\n/help\n")
    assert ended.code == 0 and ended.out == f"{first}\n{first}\n{second}\n{second}\n"
    assert "At temperature 0 the reply is always the same" in ended.err
    assert re.search(r"\n5 messages, \d+ of 600 tokens in the context, peak memory [\d.]+ GiB\n", ended.err)
    cleared = chat("Hi\n/clear\n/stats\n/system Be brief.\n/stats\n").err
    assert "\n0 messages, 0 of 600 tokens" in cleared and "\n1 message, 0 of 600 tokens" in cleared
    assert all(
        f"\n{name} " in ended.err
        for name in ("/clear", "/exit", "/help", "/load", "/regen", "/save", "/stats", "/system")
    )


def test_a_saved_chat_goes_on_in_another_process(chat: Cli, replies: list[str], tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    assert f"(3 messages saved to {file}.)" in chat(f"Hi\n/save {file}\n", "-sys", "Be brief.").err
    ended = chat(f"/load {file}\nAnd you?\n/save {file}\n", "-n", "3")
    assert ended.out == f"{replies[1]}\n" and "(3 messages loaded.)" in ended.err  # -n 8 was saved, too
    saved = json.loads(file.read_text())
    assert [each["role"] for each in saved["messages"]] == ["system", *["user", "assistant"] * 2]
    assert saved["sampling"]["max_new_tokens"] == 8 and saved["model"]


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        ("/save", "", "/save needs a file; type /save FILE"),
        ("/save {}", "my notes", "exists and is not a saved chat; name another file"),
        ("/load {}", "my notes", "is not a saved chat: "),
        ("/load {}", '{"version": 2}', "its version is 2; this program reads version 1"),
        ("/load {}.json", "", r"can't be read \(No such file"),
        ("/load {}", SAVED % '{"role": "assistant", "content": "Hi"}', "do not alternate between user and assistant"),
    ],
)
def test_files_that_are_no_chats_are_refused(chat: Cli, tmp_path: Path, words: str, text: str, message: str) -> None:
    file = tmp_path / "notes"
    file.write_text(text)
    ended = chat(words.format(file))
    assert ended.code == 2 and re.search(message, ended.err) and file.read_text() == text


def test_options_reach_the_sampler(chat: Cli, tiny: Path) -> None:
    with (
        Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine,
        engine.chat(chat_template=LINES, max_new_tokens=8, temperature=0.9, top_k=30, seed=11) as talk,
    ):
        expected = talk.send("Hi").finish().text, talk.regenerate().finish().text
    ended = chat("Hi\n/regen\n", "--temp", 0.9, "--top-k", 30, "-s", 11)
    assert ended.out == "".join(f"{text}\n" for text in expected)
    assert re.findall(r"seed (\d+) \]", ended.err) == ["11", "12"]


def test_the_model_may_be_named_twice_but_not_two(cli: Cli, tiny: Path, lines: Path, cache: Path) -> None:
    arguments = [*PLAIN, "--chat-template-file", lines]
    outputs = {
        cli("chat", *named, *arguments, stdin=b"Hi\n").out for named in ([tiny], ["-m", tiny], [tiny, "-m", tiny])
    }
    assert len(outputs) == 1 and outputs != {""}
    ended = cli("chat", tiny, "-m", "another", *arguments, stdin=b"Hi\n")
    assert refused(ended, cache) == 2 and "two models are named" in ended.err


def test_the_end_of_the_context_is_told(chat: Cli) -> None:
    ended = chat("Hi\nAnd you?\n" * 4, "-c", 60, "-n", 55)
    assert ended.code == 0 and ended.out.count("\n") >= 8
    assert "(The 2 oldest messages no longer fit in the context and are forgotten.)\n" in ended.err
    assert "(The context of 60 tokens is full; the text ends here.)\n" in ended.err


def test_the_demo_model_tells_a_story_in_turns(cli: Cli, demo: Path) -> None:
    with Engine.from_pretrained(quantizer="none", threads=1) as engine:
        first = engine.generate("Once upon a time", max_new_tokens=8).text
        second = engine.generate(f"Once upon a time{first} Then a big dog came.", max_new_tokens=8).text
        third = engine.generate(f"Once upon a time{first} Then a big dog came.{second}, but it", max_new_tokens=8).text
    ended = cli("chat", *PLAIN, stdin=b"Once upon a time \n  Then a big dog came.\n, but it\n")
    assert (ended.code, ended.out) == (0, f"{first}\n{second}\n{third}\n")


# What is wrong.


@pytest.mark.parametrize(
    ("stdin", "sentence"),
    [
        (b"ab\xff\n", "line 1 of standard input is not UTF-8 text at byte 2"),
        (b"\nab\0\n", "line 2 of standard input contains a NUL character"),
        (b"x" * (2**20 + 1), "line 1 of standard input has more than 1 MiB"),
        (b'"""' + (b"y" * 2**19 + b"\n") * 3, "the message has more than 1048576 characters"),
        (b'"""\nHi\n', 'a message that begins with """ must end with it'),
        (b"/regen\n", "there is no reply yet"),
        (b"/rgen\n", "there is no command '/rgen'; /help lists them"),
        (b"the " * 700, "the context limit is 600"),
    ],
    ids=range(8),
)
def test_unusable_input_ends_with_code_2(chat: Cli, cache: Path, stdin: bytes, sentence: str) -> None:
    ended = chat(stdin)
    assert refused(ended, cache) == 2
    assert sentence in ended.err
    later = chat(b"Hi\n/clear\n" + stdin)  # what was said before stays said
    assert later.code == 2 and later.out.count("\n") == 1 and later.err.endswith(f"{ended.err[-20:]}")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--temp", "-1"], 2, "--temp is -1"),
        (["--max-token", "5"], 2, "No such option"),
        (["--chat-template-file", "/"], 2, "the chat template from / can't be read"),
        (["--chat-template-file", "BAD"], 2, "is not UTF-8 text at byte 0"),
        (["--chat-template-file", "LOOP"], 1, "takes longer than 2 s"),
        (["--chat-template-file", "REFUSES"], 1, "refuses these messages: no system"),
        (["--chat-template-file", "GOOD", "-sys", "a\udcffb"], 2, "not valid Unicode at character 1"),
    ],
    ids=range(7),
)
def test_unusable_options(
    cli: Cli, tiny: Path, tmp_path: Path, cache: Path, arguments: list[str], code: int, sentence: str
) -> None:
    for name, data in (
        ("BAD", b"\xff"),
        ("GOOD", LINES.encode()),
        ("LOOP", b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        ("REFUSES", b"{{ raise_exception('no system') }}"),
    ):
        (tmp_path / name).write_bytes(data)
    given = [str(tmp_path / part) if part.isupper() else part for part in arguments]
    ended = cli("chat", tiny, *PLAIN, *given, stdin=b"Hi\n")
    assert refused(ended, cache) == code
    assert sentence in ended.err


def test_a_model_without_a_template_names_the_way_out(cli: Cli, tiny: Path, cache: Path) -> None:
    ended = cli("chat", tiny, *PLAIN, stdin=b"Hi\n")
    assert refused(ended, cache) == 1
    assert re.search("no chat template; give one with .*chat.template", ended.err)


# Lines become entries.


@pytest.mark.parametrize(
    ("lines", "entries"),
    [
        (["Hi", "", "  ", "there"], ["Hi", "there"]),
        (["a\\", "b\\", "", "c"], ["a\nb\n", "c"]),
        (["a\\"], ["a"]),
        (["\\", "\\", ""], []),
        (['"""', "a", "", '  b"c', '"""', "d"], ['a\n\n  b"c', "d"]),
        (['"""a', 'b"""'], ["a\nb"]),
        (['"""a"""'], ["a"]),
        (['  """', "/exit", "\\", '"""  '], ["/exit\n\\"]),
        (['""""""', "x"], ["x"]),
        (["/system  Be  brief. "], [Command("/system", "Be  brief.")]),
        (["/system Be\\", "brief."], [Command("/system", "Be\nbrief.")]),
        (["/clear", " /clear", "a /clear"], [Command("/clear", ""), " /clear", "a /clear"]),
        (["/"], [Command("/", "")]),
    ],
)
def test_lines_become_entries(lines: list[str], entries: list[str | Command]) -> None:
    rest = iter(lines)
    read = iter(lambda: read_entry(lambda prompt: next(rest, None)), None)
    assert list(read) == entries


# What a reply's speed should be.


@pytest.fixture
def int4_chat(cli: Cli, tiny: Path, lines: Path, cache: Path) -> Cli:
    arguments = ["-t", "1", "--quantizer", "rtn", "-n", "8", "--chat-template-file", lines]
    return lambda *more, stdin=b"": cli("chat", tiny, *arguments, *more, stdin=stdin)  # type: ignore[return-value,misc]


def test_replies_are_compared_with_the_plan(int4_chat: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HETERO_EE_PROFILE", "auto")
    profile = replace(reference_profile(LAPTOP), gpu=None, link=None)
    monkeypatch.setattr("hetero_ee.profiling.automatic.profile_here", lambda *_: profile)
    ended = int4_chat(stdin=b"Hi\nAnd you?\n")
    assert ended.code == 0 and len(re.findall(r"\(expected [\d.]+\)", ended.err)) == 2


def test_each_turn_has_a_seed_of_its_own_unless_one_is_given(chat: Cli) -> None:
    def seeds(*arguments: object) -> list[str]:
        ended = chat("Hi\nAnd you?\n/regen\n", "--temp", 1, *arguments)
        assert ended.code == 0, ended.err
        return re.findall(r"seed (\d+)", ended.err)

    assert len(set(seeds())) == 3
    assert seeds("-s", 7) == ["7", "7", "8"]
