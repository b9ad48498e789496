"""200 JSON schemas, ten of each kind that suites of schemas for constrained output have.

Lengths are bounded, so that a model which doesn't know what it says comes to an end.
"""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
N_EACH = 10
WORDS = ("name", "city", "price", "colour", "owner", "status", "weight", "title", "street", "animal")
SHORT: Schema = {"type": "string", "maxLength": 12}


def scalar(draw: random.Random) -> Schema:
    """Of one value."""
    return draw.choice(
        [SHORT, {"type": "integer", "minimum": -9, "maximum": 99}, {"type": "boolean"}, {"type": "null"}]
    )


def closed(properties: Schema, *optional: str) -> Schema:
    """An object of these alone."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def words(draw: random.Random, n: int) -> list[str]:
    return draw.sample(WORDS, n)


def flat(draw: random.Random) -> Schema:
    return closed({name: scalar(draw) for name in words(draw, draw.randint(1, 5))})


def optional(draw: random.Random) -> Schema:
    names = words(draw, 4)
    return closed({name: scalar(draw) for name in names}, *draw.sample(names, 2))


def nested(draw: random.Random) -> Schema:
    found = flat(draw)
    for name in words(draw, 3):
        found = closed({name: found, "note": scalar(draw)})
    return found


def enums(draw: random.Random) -> Schema:
    values: list[Any] = [*words(draw, 3), 1, 2.5, True, None, {"a": 1}, [1, "b"]]
    return closed({name: {"enum": draw.sample(values, 4)} for name in words(draw, 3)})


def constants(draw: random.Random) -> Schema:
    return closed({"version": {"const": draw.randint(1, 9)}, "kind": {"const": draw.choice(WORDS)}, "is": scalar(draw)})


def arrays(draw: random.Random) -> Schema:
    least = draw.randint(0, 2)
    return {"type": "array", "items": scalar(draw), "minItems": least, "maxItems": least + 2}


def nested_arrays(draw: random.Random) -> Schema:
    return {"type": "array", "items": arrays(draw), "minItems": 1, "maxItems": 2}


def tuples(draw: random.Random) -> Schema:
    first = [scalar(draw) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def patterns(draw: random.Random) -> Schema:
    pattern = draw.choice(
        ["^[A-Z]{2}[0-9]{3}$", "^(red|green)-\\d+$", "^[a-z]+(_[a-z]+)?$", "^#[0-9a-f]{6}$", "^a?b{2,4}$"]
    )
    name = draw.choice(WORDS)
    return closed({name: {"type": "string", "pattern": pattern.replace("+", "{1,5}")}})


def formats(draw: random.Random) -> Schema:
    names = draw.sample(["date", "uuid", "ipv4", "date-time", "time"], 2)
    return closed({name: {"type": "string", "format": name} for name in names})


def lengths(draw: random.Random) -> Schema:
    least = draw.randint(0, 6)
    return closed({name: {"type": "string", "minLength": least, "maxLength": least + 4} for name in words(draw, 2)})


def integer_bounds(draw: random.Random) -> Schema:
    low = draw.randint(-500, 500)
    kind = draw.choice([{"minimum": low, "maximum": low + 77}, {"exclusiveMinimum": low, "exclusiveMaximum": low + 30}])
    return closed({draw.choice(WORDS): {"type": "integer"} | kind})


def number_bounds(draw: random.Random) -> Schema:
    low = draw.randint(-9, 9) / 2
    return closed({draw.choice(WORDS): {"type": "number", "minimum": low, "maximum": low + 1.5}, "is": scalar(draw)})


def any_of(draw: random.Random) -> Schema:
    return closed({name: {"anyOf": [flat(draw), arrays(draw), scalar(draw)]} for name in words(draw, 2)})


def type_lists(draw: random.Random) -> Schema:
    return closed(
        {name: {"type": ["null", "integer", "boolean"], "minimum": 0, "maximum": 9} for name in words(draw, 3)}
    )


def refs(draw: random.Random) -> Schema:
    place = {"$ref": "#/$defs/place"}
    return closed({"from": place, "to": place}) | {"$defs": {"place": flat(draw)}}


def recursive(draw: random.Random) -> Schema:
    end: Schema = {"anyOf": [{"type": "null"}, {"type": "null"}, {"$ref": "#/$defs/node"}]}
    node = closed({"value": scalar(draw), "next": end})
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def all_of(draw: random.Random) -> Schema:
    low = draw.randint(0, 50)
    both = [{"type": "integer", "minimum": low}, {"maximum": low + draw.randint(1, 40)}]
    return closed({draw.choice(WORDS): {"allOf": both}})


def tagged_unions(draw: random.Random) -> Schema:
    first, second = words(draw, 2)
    each = [closed({"kind": {"const": name}, name: scalar(draw)}) for name in (first, second)]
    return {"anyOf": each}


def maps(draw: random.Random) -> Schema:
    values = draw.choice([scalar(draw), {"type": "integer", "minimum": 0, "maximum": 5}])
    return {
        "type": "object",
        "patternProperties": {"^[a-c]$": values},
        "additionalProperties": False,
        "maxProperties": 3,
    }


KINDS: tuple[Callable[[random.Random], Schema], ...] = (
    *(flat, optional, nested, enums, constants, arrays, nested_arrays, tuples, patterns, formats),
    *(lengths, integer_bounds, number_bounds, any_of, type_lists, refs, recursive, all_of, tagged_unions, maps),
)


def schemas() -> dict[str, Schema]:
    """By kind and number, the same each time."""
    return {
        f"{kind.__name__}-{n}": kind(random.Random(f"{kind.__name__} {n}")) for kind in KINDS for n in range(N_EACH)
    }
