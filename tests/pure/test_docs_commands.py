"""What README, docs and examples tell a reader to type exists: commands, their options, scripts and pages."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from hetero_ee_cli.app import app

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "cli.md"  # from the commands themselves
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.*")} - {GENERATED})
FENCE = re.compile(r"^ *```(\w*)[^\n`]*\n(.*?)^ *```$", re.M | re.S)
PLACEHOLDERS = {"...": "", "N": "1"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def typed(line: str) -> Iterator[list[str]]:
    """Arguments of each `hetero-ee` in a line for the shell."""
    line = re.sub(r"\[([^]]*)\]", r"\1", line.replace("\\\n", " "))
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    command: list[str] = []
    for word in (*words, ";"):
        if set(word) <= set("|&;<>()"):
            if command[:1] == ["hetero-ee"]:
                yield command[1:]
            command = []
        else:
            command.append(word)


def commands_of(page: Path) -> Iterator[tuple[list[str], bool]]:
    """What a page tells to type, and whether it is a whole command: in running text it may lack its arguments."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".md":
        quoted = re.findall(r"`(hetero-ee[^`]*)`|^#? *\$? *(hetero-ee .*)$", text, re.M)
        yield from ((command, False) for found in quoted for command in typed(max(found)))
        return
    for language, block in FENCE.findall(text):
        if language in ("sh", "console"):
            prompt = "$ " if language == "console" else ""
            lines = [line.removeprefix(prompt) for line in block.splitlines() if line.startswith(prompt)]
            yield from ((command, True) for line in lines for command in typed(line))
    for span in re.findall(r"`(hetero-ee\b[^`]*)`", FENCE.sub("", text)):
        yield from ((command, False) for command in typed(" ".join(span.split())))


def refusal(arguments: list[str], is_whole: bool) -> str:
    """What the command line says against these arguments; empty where it takes them. Runs nothing."""
    command: Any = get_command(app)
    given = [word for each in arguments if (word := PLACEHOLDERS.get(each, each))]
    context: Any = None
    name = "hetero-ee"
    try:
        while True:
            context = command.make_context(name, given, parent=context, resilient_parsing=False)
            if not hasattr(command, "commands"):
                return ""
            given = [*context._protected_args, *context.args]
            if not given:
                return ""
            name, command, given = command.resolve_command(context, given)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        is_missing = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError")
        return "" if is_missing and not is_whole else str(error.format_message())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hetero-ee generate hi --no-such-option", "--no-such-option"),
        ("true && hetero-ee nothing", "nothing"),
        ("hetero-ee plan --hardware", "--hardware"),
        ("echo x | hetero-ee generate - -n 3  # it's a comment", ""),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, words: str) -> None:
    (arguments,) = typed(line)
    said = refusal(arguments, is_whole=True)
    assert (words in said) if words else not said


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page_exist(page: Path) -> None:
    found = list(commands_of(page))
    assert not {" ".join(given): said for given, is_whole in found if (said := refusal(given, is_whole))}
    assert found or page.name not in ("README.md", "first_evening.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_scripts_and_pages_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = [ROOT / script for script in re.findall(r"python ((?:scripts|tests|examples)/[\w/]+\.py)", text)]
    linked = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)[^)]*\)", text) if page.suffix == ".md" else []
    assert not [str(file) for file in (*scripts, *(page.parent / link for link in linked)) if not file.exists()]


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings get: lower case, hyphens for blanks, no other punctuation."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=name_of)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([\w./]*\.md)?#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert not [
        (target, anchor) for target, anchor in links if anchor not in anchors(page.parent / (target or page.name))
    ]
