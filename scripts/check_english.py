"""Count the phrases that CONTRIBUTING.md rules out. Fails if a room has more of them than .ci/english.json allows.

python scripts/check_english.py             check, as CI does
python scripts/check_english.py PATH ...    list what is found below these paths
python scripts/check_english.py --update    lower the allowed counts to what is found; --reset also raises them
"""

import ast
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALLOWED = ROOT / ".ci" / "english.json"
CODE = ("hetero_ee/", "kernels/", "cpu_ops/", "profiles/", "cli/", "scripts/", "examples/")
DOCS = ("docs/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
# Generated pages, whose sentences are in the code, and this file, which lists the phrases.
LEFT_OUT = ("docs/cli.md", "docs/gpu_kernels.md", "docs/first_evening.md", "scripts/check_english.py")
THIS = "scripts/check_english.py"  # lists the phrases
MIN_WORDS = 5  # of a string that counts as a message

# Sentences that start with one of these words are usually fragments that only make sense next to the signature.
FRAGMENT = re.compile(r"(?:Of|For(?![^.]*, [a-z])|That|What|The same|Those|Whose|As|So|Likewise)\b")
PHRASES = (
    r"None where|[Rr]aises \w+ where|are told|is told|as \w+ (?:has|have) it|so many|(?<![Tt]here )is none",
    r"(?<![Tt]here )is no (?!longer|more|less|slower|larger)",
    r"behind (?:\d+|the (?:marker|context|prompt))",
    r"anew|be had|beside|dearer|for want of|g(?:o|one|oes) on with|in turns?|lies?|nobody|whoever",
    r"crossings?|ha(?:s|ve|d) room for|waiting tokens?|what (?:is|was) asked for",
)
WORDS = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b")
QUOTED = re.compile(r"`[^`]*`|\"[^\"\n]*\"")


@dataclass(frozen=True)
class Finding:
    """A phrase to rewrite."""

    path: str  # from the repository's root
    line: int
    text: str  # the phrase and its beginning

    @property
    def room(self) -> str:
        """Folder of the file."""
        return str(Path(self.path).parent)


def findings(path: str, source: str) -> list[Finding]:
    """Return what one file should say differently. `path` decides whether it is code or a page."""
    if path.endswith(".py"):
        tree = ast.parse(source)
        return [*_in_docstrings(path, tree), *_in_messages(path, tree), *_in_comments(path, source)]
    return [*_in_page(path, source)]


def _in_docstrings(path: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        docstring = ast.get_docstring(node)
        if docstring and (match := FRAGMENT.match(docstring) or WORDS.search(_prose(docstring))):
            yield _finding(path, node.body[0].lineno, match, docstring)


def _in_messages(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Messages and help texts: strings of several words that aren't statements of their own, as docstrings are."""
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements
        if is_string and len(node.value.split()) >= MIN_WORDS and (match := WORDS.search(_prose(node.value))):
            yield _finding(path, node.lineno, match, node.value)


def _in_comments(path: str, source: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := WORDS.search(_prose(token.string))):
            yield _finding(path, token.start[0], match, token.string)


def _in_page(path: str, source: str) -> Iterator[Finding]:
    is_code = False
    for number, line in enumerate(source.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and (match := WORDS.search(_prose(line))):
            yield _finding(path, number, match, line)


def _finding(path: str, line: int, match: re.Match[str], text: str) -> Finding:
    return Finding(path, line, f"[{match[0]}] {' '.join(text.split())[:100]}")


def _prose(text: str) -> str:
    """Return `text` without names and quotations, which may use any word."""
    return QUOTED.sub("", text)


def tracked_files() -> list[str]:
    """Return the packages' Python files and the pages, as git lists them, without the generated pages."""
    listed = subprocess.run(["git", "ls-files", *CODE, *DOCS], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if name.endswith((".py", ".md")) and name not in LEFT_OUT]
    return [name for name in names if (name.endswith(".py") or name.startswith(DOCS)) and (ROOT / name).exists()]


def too_many(found: Iterable[Finding], allowed: dict[str, int]) -> dict[str, int]:
    """Return the rooms with more findings than allowed, and their counts. A room that isn't listed may have none."""
    counts = Counter(finding.room for finding in found)
    return {room: count for room, count in sorted(counts.items()) if count > allowed.get(room, 0)}


def lowered(found: Iterable[Finding], allowed: dict[str, int]) -> dict[str, int]:
    """Return allowed counts that are no higher than before and no higher than needed."""
    counts = Counter(finding.room for finding in found)
    return {room: min(count, counts[room]) for room, count in sorted(allowed.items()) if counts[room]}


def main(arguments: list[str]) -> int:
    """Run the check and return the exit code."""
    found = [finding for name in tracked_files() for finding in findings(name, (ROOT / name).read_text("utf-8"))]
    allowed: dict[str, int] = json.loads(ALLOWED.read_text("utf-8")) if ALLOWED.exists() else {}
    if arguments in (["--update"], ["--reset"]):
        counts = dict(sorted(Counter(finding.room for finding in found).items()))
        kept = counts if arguments == ["--reset"] else lowered(found, allowed)
        ALLOWED.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        return 0
    if arguments:
        _list(finding for finding in found if finding.path.startswith(tuple(arguments)))
        return 0
    rooms = too_many(found, allowed)
    for room, count in rooms.items():
        print(f"{room}: {count} phrases to rewrite, {allowed.get(room, 0)} allowed")
        _list(finding for finding in found if finding.room == room)
    print(f"english: {len(found)} phrases to rewrite, {sum(allowed.values())} allowed")
    return 1 if rooms else 0


def _list(found: Iterable[Finding]) -> None:
    for finding in found:
        print(f"  {finding.path}:{finding.line} {finding.text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
