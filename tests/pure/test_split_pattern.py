"""Expressions of published tokenizers pass; those that can take a lifetime don't."""

import pytest

from hetero_ee.text.split_pattern import MAX_LENGTH, why_slow

PUBLISHED = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "DeepSeek V3": (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "BLOOM": " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    "digits from the right": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    "three digits": r"[0-9][0-9][0-9]",
    "blanks": " {2,}",
    "line ends": r"[\r\n]",
    "a brace": r"a{b}|{|}",
}
SLOW = [
    r"(a+)+$",
    r"(a*)*b",
    r"(a|a)*c",
    r"(?:a|aa)+$",
    r"(a?){30}a{30}",
    r"(a{1,5}){1,5}",
    r"((a)+b)*c",
    r"(([ab]+)c?)*d",
    r"(?i-s:(a+)b)+",
    r"(?<name>a+)+",
    r"(a\)+)+x",
    r"([)]a+)+x",
    r"([[a]b]+)+c",
    r"(\\+)+x",
    r"a{1,3}+b",
    r"a**",
    r"a+{2}",
    r"(?=(a+)+b)",
    "a*" * 5 + "b",
    "a{0,45}" * 4 + "[bc]d",
    "(?:a{0,45})" * 4 + "[bc]d",
    r"(?:a{0,45}){4}[bc]d",
    "a{0,1000}" * 4 + "[bc]d",
    "(a*b*c*)d*e*",
]
UNUSUAL = [
    r"(a)\1",
    r"(?<x>a|b\g<x>c)",
    r"(?R)",
    r"(?(1)a|b)",
    r"(?~ab)",
    r"(?#[)(a+)+(?#])",
    "(?x)#[\n(a+)+#]",
    "(?ix:#[\n(a+)+#]\n)",
    r"\Q[\E(a+)+\Q]\E",
    r"\c[(a+)+\c]",
    "a" * (MAX_LENGTH + 1),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_expressions_pass(name: str) -> None:
    assert why_slow(PUBLISHED[name]) is None


@pytest.mark.parametrize("expression", SLOW)
def test_ambiguous_repetition_is_refused(expression: str) -> None:
    assert "several ways" in (why := why_slow(expression) or "") or "unbounded repetitions" in why


@pytest.mark.parametrize("expression", UNUSUAL, ids=lambda text: text[:20])
def test_what_could_hide_it_is_refused(expression: str) -> None:
    assert why_slow(expression)


def test_a_repeated_group_may_have_alternatives_of_its_parts_only_once() -> None:
    assert why_slow("(?:abc)+") is None and why_slow("(?:a|b)?") is None and why_slow("(?:a|b)+")
