"""Changes to good JSON that an attacker, a bad disk or a bug would make. The same seed makes the same changes."""

import copy
import json
import random
import re
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 3, 4, 7, 8, 9, 16, 255, 4095, 4096, 4097, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**19, 10**30, -8, -(2**31), -(2**63), 10**400),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "a", "F32", "fp32", "\ud800", "\0", "\x1b[2J", "x" * 600, 0.5, 8.0, -0.0, 1e300),
    *(float("nan"), float("inf"), [], [0], [0, 8], [[]], [None], {}, {"a": 1}, {"dtype": "F32"}),
)
PIECES = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800", b"-", b"e5", b".5", b"null", b"NaN"),
    *(
        b"Infinity",
        b"true",
        b"\xff",
        b"\xc3",
        b"\xef\xbb\xbf",
        b"\0",
        b"\n",
        b" ",
        b'"a":',
        b"{}",
        b"[[[[",
        b"0",
        b"9" * 25,
    ),
)
_NUMBER = re.compile(rb"\d+")
_PAIR = re.compile(rb'"[^"]*": ?(?:"[^"]*"|\d+|\[[^\[\]]*\])')  # a name with a plain value


def mutated(body: Any, rng: random.Random) -> bytes:
    """The JSON of `body` with one to three changes: to its structure, its text, or both. `body` stays as it is."""
    changed = json.loads(json.dumps(body)) if (in_structure := rng.random() < 0.6) else body
    if in_structure:
        for _ in range(rng.randint(1, 3)):
            change_structure(changed, rng)
    data = json.dumps(changed, indent=1 if rng.random() < 0.1 else None, ensure_ascii=rng.random() < 0.7)
    text = data.encode(errors="surrogatepass")
    if not in_structure or rng.random() < 0.2:
        for _ in range(rng.randint(1, 3)):
            text = change_text(text, rng)
    return text


def change_structure(body: Any, rng: random.Random) -> None:
    """One change somewhere in lists and objects: a value, a name, something more, or something less."""
    place = body
    while True:
        inner = [child for child in _children(place) if isinstance(child, dict | list) and child]
        if not inner or rng.random() < 0.3:
            break
        place = rng.choice(inner)
    if not place:
        return
    key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    kind = rng.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1:
        place[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 2 and isinstance(place[key], int):
        place[key] += rng.choice((-4096, -8, -1, 1, 4, 8, 4096))
    elif kind == 3 and isinstance(place, dict):
        place[rng.choice(("a", "", "\x1b", "name", "shape", "__metadata__", str(key) + "x"))] = place.pop(key)
    elif kind == 4 and isinstance(place, list):
        place.insert(key, rng.choice((place[key], copy.deepcopy(rng.choice(VALUES)))))
    else:
        place[key] = rng.choice(NUMBERS)


def change_text(text: bytes, rng: random.Random) -> bytes:
    """One change to bytes: a bit, a piece more or less, something doubled or exchanged, the end cut, another number."""
    if not text:
        return rng.choice(PIECES)
    start = rng.randrange(len(text))
    end = min(len(text), start + rng.choice((1, 1, 2, 8, 40)))
    kind = rng.randrange(8)
    if kind == 0:
        return text[:start] + bytes([text[start] ^ 1 << rng.randrange(8)]) + text[start + 1 :]
    if kind == 1:
        return text[:start] + text[end:]
    if kind == 2:
        return text[:start] + rng.choice(PIECES) + text[start:]
    if kind == 3:
        return text[:end] + text[start:]
    if kind == 4:
        return text[:start]
    found = list((_NUMBER if kind == 5 else _PAIR).finditer(text)) if kind in (5, 6) else []
    if found:
        match = rng.choice(found)
        number = rng.choice((b"-" + match[0], match[0] + b".0", str(rng.choice(NUMBERS)).encode()))
        return text[: match.start()] + (number if kind == 5 else match[0] + b", " + match[0]) + text[match.end() :]
    other = rng.randrange(len(text))
    return text[:start] + text[other : other + end - start] + text[end:]


def _children(place: Any) -> list[Any]:
    return list(place.values()) if isinstance(place, dict) else place
