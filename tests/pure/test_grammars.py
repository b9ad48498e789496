"""What a grammar lets follow, and what is refused as one."""

import json
import random
from typing import Any

import numpy as np
import pytest

from hetero_ee.config import demo_model_folder
from hetero_ee.decoding.constrained.constraint import Constraint
from hetero_ee.decoding.constrained.grammars import Grammars
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.text.tokenizer import Tokenizer

N_TOKENS, END = 2048, 1
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo_model_folder(), N_TOKENS)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.as_json, N_TOKENS, [END])


def constraint(grammars: Grammars, **asked: Any) -> Constraint:
    found = grammars.constraint(SamplingParams(**asked))
    assert found is not None
    return found


def written(constraint: Constraint, draw: random.Random, most: int = 200) -> list[int]:
    """A text of tokens drawn from those that may follow."""
    ids: list[int] = []
    while not constraint.is_complete(ids) and len(ids) < most:
        ids.append(int(draw.choice(np.flatnonzero(constraint.allowed(ids)))))
    return ids


def test_a_text_without_a_grammar_has_no_constraint(grammars: Grammars) -> None:
    assert grammars.constraint(SamplingParams()) is None


@pytest.mark.parametrize("seed", range(5))
def test_what_may_follow_makes_json_of_the_schema(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    ids = written(constraint(grammars, json_schema=PERSON), random.Random(seed))
    said = json.loads(tokenizer.decode(ids))
    assert said["name"] in ("Tom", "Lily") and 0 <= said["age"] <= 120 and tokenizer.decode(ids) == json.dumps(said)


def test_forced_tokens_are_the_only_ones_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    held, ids = constraint(grammars, json_schema=PERSON), list[int]()
    forced = held.forced([])
    assert tokenizer.decode(forced) == '{"name": "'
    for token_id in forced:
        assert np.flatnonzero(held.allowed(ids)).tolist() == [token_id]
        ids.append(token_id)
    assert held.forced(ids) == [] and held.allowed(ids).sum() > 1


@pytest.mark.parametrize("seed", range(5))
def test_masks_are_those_of_a_text_that_was_never_taken_back(grammars: Grammars, seed: int) -> None:
    """Asked with drafts, without them, with others: as a matcher that sees the text alone says."""
    draw = random.Random(seed)
    ids = written(constraint(grammars, json_schema=PERSON), draw)
    held, n_taken = constraint(grammars, json_schema=PERSON), 0
    while n_taken < len(ids):
        n_drafts = draw.randint(0, 4)
        drafts = list(ids[n_taken : n_taken + n_drafts])
        if drafts and draw.random() < 0.5:
            others = np.flatnonzero(held.allowed([*ids[:n_taken], *drafts[:-1]]))
            drafts[-1] = int(draw.choice(others))
        for n in range(len(drafts) + 1):
            if not held.is_complete([*ids[:n_taken], *drafts[:n]]):
                held.allowed([*ids[:n_taken], *drafts[:n]])
        n_taken += draw.randint(1, 3)
        now = ids[:n_taken]
        fresh = constraint(grammars, json_schema=PERSON)
        assert held.allowed(now).tolist() == fresh.allowed(now).tolist()
        assert held.is_complete(now) == fresh.is_complete(now) == (n_taken >= len(ids))


def test_a_text_ends_where_the_grammar_may_and_must(grammars: Grammars, tokenizer: Tokenizer) -> None:
    held = constraint(grammars, grammar='start: "Tom" /[a-z]{0,2}/')
    begun = tokenizer.encode("Tom", with_special_tokens=False)
    assert held.allowed(begun)[END] and not held.is_complete(begun)
    (letter,) = tokenizer.encode("a", with_special_tokens=False)
    assert held.is_complete([*begun, letter, letter])
    endless = constraint(grammars, grammar='start: "Tom" /[a-z]{0,2}/', ignore_eos=True)
    assert not endless.allowed(begun)[END] and endless.allowed(begun).any()


def test_gbnf_is_taken_too(grammars: Grammars, tokenizer: Tokenizer) -> None:
    held = constraint(grammars, grammar='root ::= "yes" | "no"')
    assert tokenizer.decode(written(held, random.Random(0))) in ("yes", "no")


def test_a_vocabulary_larger_than_the_tokenizers_is_padded(tokenizer: Tokenizer) -> None:
    held = constraint(Grammars(tokenizer.as_json, N_TOKENS + 61, [END]), json_schema={"type": "string"})
    mask = held.allowed([])
    assert mask.shape == (N_TOKENS + 61,) and not mask[N_TOKENS:].any()


def test_tokens_that_the_model_lacks_are_not_allowed(tokenizer: Tokenizer) -> None:
    held = constraint(Grammars(tokenizer.as_json, 500, [END]), json_schema=PERSON)
    assert held.allowed([]).shape == (500,)
    few = constraint(Grammars(tokenizer.as_json, 90, [END]), json_schema=PERSON)
    with pytest.raises(HeteroError, match="has no token that the grammar lets follow"):
        few.allowed([])


REFUSED: dict[str, tuple[Any, str]] = {
    "a negation": ({"not": {"type": "string"}}, "json_schema asks for not, which a text can't be held to"),
    "two keywords": ({"if": {}, "then": {}}, "json_schema asks for if, then, which"),
    "uniqueness": ({"type": "array", "uniqueItems": True}, "asks for uniqueItems, which"),
    "a type that is none": ({"type": "strnig"}, "json_schema can't be used: Invalid type: strnig"),
    "a format that is none": ({"type": "string", "format": "banana"}, "Unknown format: banana"),
    "a file elsewhere": ({"$ref": "http://example.com/a.json"}, "http://example.com/a.json"),
    "a look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "nothing that keeps to it": ({"type": "string", "enum": [1]}, "json_schema can't be used"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_schema_that_can_not_be_held_to_is_refused(grammars: Grammars, case: str) -> None:
    schema, message = REFUSED[case]
    with pytest.raises(UsageError) as refused:
        grammars.constraint(SamplingParams(json_schema=schema))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("schema", ["{", "{'a': 1}", b"{}", {"a": {1, 2}}, "[" * 100_000, {"a": float("nan")}])
def test_what_is_no_json_is_refused(schema: Any) -> None:
    with pytest.raises(UsageError, match="which is not JSON"):
        SamplingParams(json_schema=schema)


@pytest.mark.parametrize("grammar", ["start: a", "root ::= (", "%%%", ""])
def test_what_is_no_grammar_is_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(UsageError, match=r"^grammar can't be") as refused:
        grammars.constraint(SamplingParams(grammar=grammar))
    assert "\n" not in str(refused.value)


def test_a_grammar_and_a_schema_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="are both given; leave one out"):
        SamplingParams(json_schema=PERSON, grammar="start: /a/")
    with pytest.raises(UsageError, match="expected a JSON Schema that is an object"):
        SamplingParams(json_schema="[]")
    with pytest.raises(UsageError, match="expected some text"):
        SamplingParams(grammar=3)  # type: ignore[arg-type]


def test_schemas_of_a_megabyte_are_taken(grammars: Grammars) -> None:
    """Where others stop at 100 kB: so large are the tools of an agent."""
    wide = {f"field_{i}": {"type": "string", "description": "x" * 400} for i in range(500)}
    held = constraint(grammars, json_schema={"type": "object", "properties": wide, "additionalProperties": False})
    assert held.allowed([]).any()


@pytest.mark.parametrize("asked", [{"grammar": 'start: "a"' + " " * 2**19}, {"json_schema": {"enum": ["a" * 2**19]}}])
def test_an_enormous_grammar_is_refused_before_it_is_compiled(grammars: Grammars, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected at most 524288"):
        constraint(grammars, **asked)
