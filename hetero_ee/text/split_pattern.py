"""Find regular expressions that backtrack catastrophically because they can match a text in too many ways.

A group that is repeated must not have variable contents: (a+)+ splits n letters in 2^(n-1) ways. An alternative may
have a few unbounded repetitions: each multiplies the ways by the length of the text, or by its bound.
"""

import re
from dataclasses import dataclass

MAX_LENGTH = 10_000  # the longest published ones have about 1500 characters
MAX_ENDLESS = 3  # (nearly) unbounded repetitions in one alternative; published ones have up to two
MAX_SPREAD = 3  # between a repetition's bounds, if it does not count as unbounded; published: {1,3}
# References to groups, calls, conditions, absence, comments, free spacing and quotes: no published tokenizer needs
# them, and some hide the expression's effect from the parser below.
_UNUSUAL = re.compile(r"\\[1-9kgQcCM]|\(\?(?:[R0-9&~(#]|P[=>]|[a-wyzA-Z-]*x)")
_ESCAPE = re.compile(r"\\(?:[pPxo]\{[^}]*\}|.)", re.DOTALL)
_GROUP_START = re.compile(r"\((?:\?(?:<[=!]|P?<\w+>|[:=!>]|[a-zA-Z-]+:?))?")
_TOKEN = re.compile(r"[()|]|(?:[*+?]|\{\d*,?\d*\})+|.", re.DOTALL)
_REPEAT = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
CHARACTER = "a"  # stands for anything that matches one character


def why_slow(expression: str) -> str | None:
    """Return why an expression in Oniguruma's syntax is refused, or None if it is simple enough."""
    if len(expression) > MAX_LENGTH:
        return f"has {len(expression)} characters, expected at most {MAX_LENGTH}"
    text = expression.replace("\\\\", CHARACTER)
    if _UNUSUAL.search(text):
        return "uses more than plain groups, classes and repetition"
    text = _GROUP_START.sub("(", _without_classes(_ESCAPE.sub(CHARACTER, text)))
    groups, closed = [_Group()], _Group()
    for token in _TOKEN.findall(text):
        if token == "(":
            groups.append(_Group())
        elif token == ")" and len(groups) > 1:
            closed = groups.pop()
            groups[-1].hold(closed)
            continue
        elif token == "|":
            groups[-1].begin_alternative()
        elif _REPEAT.match(token) and not groups[-1].repeat(token, closed):
            return "repeats a group that matches one text in several ways"
        if groups[-1].n_endless > MAX_ENDLESS:
            return f"has more than {MAX_ENDLESS} unbounded repetitions, or nearly so, in one alternative"
        closed = _Group()
    return None


def _without_classes(text: str) -> str:
    """Replace each character class, nested or not, by one character."""
    kept, depth = [], 0
    for character in text:
        depth += character == "["
        if depth == 0:
            kept.append(character)
        elif character == "]":
            depth -= 1
            kept += [CHARACTER] if depth == 0 else []
    return "".join(kept)


@dataclass(slots=True)
class _Group:
    """A group of a regular expression during parsing."""

    is_variable: bool = False  # may match one text in several ways
    n_endless: int = 0  # (nearly) unbounded repetitions in the current alternative
    most_endless: int = 0  # the most in an earlier alternative

    def hold(self, inner: "_Group") -> None:
        self.is_variable |= inner.is_variable
        self.n_endless += max(inner.n_endless, inner.most_endless)

    def begin_alternative(self) -> None:
        self.is_variable = True
        self.n_endless, self.most_endless = 0, max(self.n_endless, self.most_endless)

    def repeat(self, repeats: str, last: "_Group") -> bool:
        """Parse the repetition, perhaps lazy, of `last`. Returns False if a group is variable and repeated."""
        first, *others = _REPEAT.finditer(repeats)
        least, most = _range(first)
        if (most is None or most > 1) and last.is_variable:
            return False
        if least != most:
            self.is_variable = True
            self.n_endless += most is None or most - least > MAX_SPREAD
        return all(other[0] in "+?" for other in others[:1]) and len(others) <= 1 and not (first[1] and others)


def _range(repeat: re.Match[str]) -> tuple[int, int | None]:
    if repeat[1] is None:
        return (0, 1) if repeat[0] == "?" else (repeat[0] == "+", None)
    least = int(repeat[1] or 0)
    return least, int(repeat[3]) if repeat[3] else None if repeat[2] else least
