"""Tokenizer files that are damaged or hostile: refused when the model is opened, or, at the latest, with the prompt."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, ModelError
from tests.bad_models import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    Spoil,
    also,
    check_refusal,
    content,
    edit_json,
    sparse,
)
from tests.character_maps import character_map

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def stage(name: str, value: Any) -> Spoil:
    """Puts this in place of one stage of tokenizer.json."""
    return edit_json(TOKENIZER, lambda values: values.update({name: value}))


def normalizers(*steps: Any) -> Spoil:
    return stage("normalizer", {"type": "Sequence", "normalizers": list(steps)})


def replace(pattern: Any, text: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": text}


def split(expression: str) -> Spoil:
    pattern = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return stage("pre_tokenizer", pattern)


def charsmap(data: bytes) -> Spoil:
    return normalizers({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()})


def template(pieces: Any, specials: Any) -> Spoil:
    return stage(
        "post_processor", {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": specials}
    )


def model(**changes: Any) -> Spoil:
    return edit_json(TOKENIZER, lambda values: values["model"].update(changes))


def model_tokens(*tokens: str) -> Spoil:
    """More of them in the vocabulary."""

    def change(values: dict[str, Any]) -> None:
        vocabulary = values["model"]["vocab"]
        vocabulary.update({token: len(vocabulary) + i for i, token in enumerate(tokens)})

    return edit_json(TOKENIZER, change)


def settings(**changes: Any) -> Spoil:
    return edit_json(TOKENIZER_CONFIG, lambda values: values.update(changes))


def special(**fields: Any) -> Spoil:
    return content("special_tokens_map.json", json.dumps(fields).encode())


def added(n: int) -> dict[str, Any]:
    """As in added_tokens_decoder."""
    return {str(3000 + i): {"content": f"<extra_{i}>"} for i in range(n)}


DOUBLED = replace({"String": "a"}, "aa")
PREPENDED = {"type": "Prepend", "prepend": "x" * 50}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "<s>", "type_id": 0}}
NESTED: Any = None
for _ in range(200):
    NESTED = {"type": "Sequence", "normalizers": [NESTED] if NESTED else []}

BAD: dict[str, tuple[Spoil, str]] = {
    "empty": (content(TOKENIZER, b""), "is empty"),
    "cut": (content(TOKENIZER, b'{"version": "1.0", '), "not valid JSON"),
    "an empty object": (content(TOKENIZER, b"{}"), "can't be read"),
    "a list": (content(TOKENIZER, b"[]"), "can't be read"),
    "Git LFS pointer": (content(TOKENIZER, b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "web page": (content(TOKENIZER, b"<!DOCTYPE html>"), "web page"),
    "UTF-16": (content(TOKENIZER, "{}".encode("utf-16")), "UTF-16"),
    "65 MB": (sparse(TOKENIZER, 65 * 2**20), "a tokenizer has at most"),
    "a gigabyte": (sparse(TOKENIZER, 2**30), "a tokenizer has at most"),
    "a million levels": (content(TOKENIZER, b"[" * 1_000_000), "nested too deeply"),
    "a million levels of objects": (content(TOKENIZER, b'{"a":' * 1_000_000), "nested too deeply"),
    "six million lists": (content(TOKENIZER, b"[" + b"[]," * 6_000_000 + b"[]]"), "at most 5000000"),
    "a number of 5000 digits": (content(TOKENIZER, b"[" + b"9" * 5000 + b"]"), "limit (4300 digits)"),
    "replacements that double": (normalizers(*[DOUBLED] * 40), "could turn one byte into more than 1000"),
    "one that does it at once": (normalizers(replace({"String": "a"}, "a" * 2000)), "more than 1000"),
    "one that matches nothing": (normalizers(replace({"Regex": ""}, "a" * 2000)), "more than 1000"),
    "one that may match nothing": (normalizers(replace({"Regex": "a{2,}?|b{0,}"}, "a" * 2000)), "more than 1000"),
    "one that matches two letters": (normalizers(replace({"Regex": r"\Aba{1,}"}, "a" * 2003)), "more than 1000"),
    "one that matches the empty text": (normalizers(replace({"String": ""}, "a" * 2000)), "more than 1000"),
    "beginnings": (normalizers(*[PREPENDED] * 3), "more than 1000"),
    "compatible forms": (normalizers(*[{"type": "NFKC"}] * 4), "more than 1000"),
    "nested doubling": (
        normalizers({"type": "Sequence", "normalizers": [DOUBLED] * 9}, {"type": "Sequence", "normalizers": [DOUBLED]}),
        "more than 1000",
    ),
    "sequences in sequences": (stage("normalizer", NESTED), "more than 100 normalizers"),
    "a thousand steps": (normalizers(*[{"type": "Strip"}] * 1000), "more than 100 normalizers"),
    "byte levels": (
        stage("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 12}),
        "its pre_tokenizer could turn one byte into more than 1000",
    ),
    "doubling in two stages": (
        also(
            normalizers(*[DOUBLED] * 9), stage("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 9})
        ),
        "its pre_tokenizer could turn one byte into more than 1000",
    ),
    "a decoder that doubles": (
        stage("decoder", {"type": "Sequence", "decoders": [DOUBLED] * 40}),
        "its decoder could turn one byte into more than 1000",
    ),
    "a character map of novels": (charsmap(character_map({"a": "x" * 5000})), "more than 1000"),
    "a damaged character map": (charsmap(b"\xff\xff\xff\x7f"), "character map is damaged"),
    "a template that repeats the text": (template([TEXT] * 101, {}), "more than 100 parts"),
    "a special token of 10,000": (
        template([SPECIAL, TEXT], {"<s>": {"id": "<s>", "ids": [1] * 10_000, "tokens": ["a"] * 10_000}}),
        "more than 100 parts",
    ),
    "templates in sequence": (
        stage(
            "post_processor",
            {
                "type": "Sequence",
                "processors": [{"type": "TemplateProcessing", "single": [TEXT] * 99, "special_tokens": {}}] * 2,
            },
        ),
        "more than 1000",
    ),
    "a regular bomb": (split(r"(a+)+$"), "matches one text in several ways"),
    "a regular bomb of alternatives": (split(r"(?:a|a)*c"), "matches one text in several ways"),
    "a regular bomb of stars": (split("a*" * 30 + "c"), "more than 3 unbounded repetitions"),
    "an expression of 20 kB": (split("a" * 20_000), "20000 characters"),
    "an expression that calls itself": (split(r"(?<x>a|b\g<x>c)"), "more than plain groups"),
    "an expression that is none": (split("(a"), "can't be read"),
    "a bomb in a normalizer": (normalizers(replace({"Regex": "(x+x+)+y"}, "")), "in several ways"),
    "an unknown normalizer": (normalizers({"type": "Exec", "command": "true"}), "type 'Exec' is not supported"),
    "a step without a type": (normalizers({"pattern": {"String": "a"}, "content": "b"}), "an object with a type"),
    "a step that is a string": (normalizers("NFC"), "an object with a type"),
    "a sequence of nothing": (stage("normalizer", {"type": "Sequence"}), "can't be read"),
    "an unknown model": (model(type="Pickle"), "can't be read"),
    "a vocabulary that is a string": (model(vocab="abc"), "can't be read"),
    "a vocabulary of strings": (model(vocab={"a": "b"}), "can't be read"),
    "negative ids": (model(vocab={"a": -1}), "can't be read"),
    "fractions for ids": (model(vocab={"a": 0.5}), "can't be read"),
    "an id beyond 32 bits": (model(vocab={"a": 2**32}), "can't be read"),
    "merges of unknown tokens": (model(merges=[["nowhere", "seen"]]), "can't be read"),
    "merges that are numbers": (model(merges=[1, 2]), "can't be read"),
    "merges of three": (model(merges=[["a", "b", "c"]]), "can't be read"),
    "added tokens that are a string": (stage("added_tokens", "x"), "can't be read"),
    "an added token with a negative id": (stage("added_tokens", [{"id": -5, "content": "x"}]), "can't be read"),
    "settings empty": (content(TOKENIZER_CONFIG, b""), "is empty"),
    "settings a list": (content(TOKENIZER_CONFIG, b"[]"), "can't be read"),
    "settings cut": (content(TOKENIZER_CONFIG, b'{"a":'), "not valid JSON"),
    "settings nested": (content(TOKENIZER_CONFIG, b"[" * 100_000), "nested too deeply"),
    "settings of a gigabyte": (sparse(TOKENIZER_CONFIG, 2**30), "a tokenizer has at most"),
    "settings that name another file": (settings(fast_tokenizer_files=["../x.json"]), "fast_tokenizer_files"),
    "settings that name a GGUF": (settings(gguf_file="/etc/passwd"), "gguf_file"),
    "settings with a vocabulary": (settings(vocab={"a": 0}), "vocab"),
    "settings with arguments": (settings(init_inputs=["x"]), "init_inputs"),
    "settings with an object": (settings(tokenizer_object={"a": 1}), "tokenizer_object"),
    "a token with id 10^12": (settings(added_tokens_decoder={str(10**12): {"content": "x"}}), "token id"),
    "a token with id -1": (settings(added_tokens_decoder={"-1": {"content": "x"}}), "token id"),
    "a token with id x": (settings(added_tokens_decoder={"x": {"content": "x"}}), "token id"),
    "a token that is a number": (settings(added_tokens_decoder={"3": 7}), "can't be read"),
    "a token with a field that rings": (
        settings(added_tokens_decoder={"3": {"content": "x", "\x07\x1b[2J": True}}),
        "a token has a field '\\x07\\x1b[2J'",
    ),
    "an end token with such a field": (settings(eos_token={"content": "x", "\x1b]0;": 1}), "a token has a field"),
    "an added token with such a field": (stage("added_tokens", [{"id": 5, "content": "x", "\n": 1}]), "has a field"),
    "a class that is a number": (settings(tokenizer_class=7), "can't be read"),
    "an end token that is a list": (settings(eos_token=["</s>"]), "can't be read"),
    "settings that name a vocabulary file": (settings(vocab_file="/etc/passwd"), "field 'vocab_file' is not supported"),
    "settings that name a tokenizer": (settings(tokenizer_file="../other.json"), "field 'tokenizer_file'"),
    "special tokens that name a tokenizer": (special(tokenizer_file="/tmp/other.json"), "field 'tokenizer_file'"),
    "special tokens that name a vocabulary": (special(vocab_file="x", merges_file="y"), "field 'vocab_file'"),
    "special tokens that name code": (special(auto_map={"AutoTokenizer": "evil.Evil"}), "field 'auto_map'"),
    "special tokens that name an object": (special(tokenizer_object={"a": 1}), "field 'tokenizer_object'"),
    "special tokens with a field that rings": (special(**{"\x07\x1b[2J": 1}), "field '\\x07\\x1b[2J'"),
    "a special token with a field that would be printed": (
        special(eos_token={"content": "</s>", "colour": "red"}),
        "a token has a field 'colour'",
    ),
    "a listed token with such a field": (
        special(additional_special_tokens=[{"content": "</s>", "__type": "AddedToken"}]),
        "a token has a field '__type'",
    ),
    "a token without content and with such a field": (
        special(eos_token={"\x1b]52;": 1}),
        "a token has a field '\\x1b]52;'",
    ),
    "such a token in the vocabulary": (settings(added_tokens_decoder={"3": {"\x1b]52;": 1}}), "a token has a field"),
    "such a token where only its type tells": (
        settings(a={"b": [{"__type": "AddedToken", "\x1b]52;": 1}]}),
        "a token has a field '\\x1b]52;'",
    ),
    "200,000 added tokens": (
        settings(added_tokens_decoder=added(200_000)),
        "has 200000 added tokens, expected at most",
    ),
    "an added token with a field that would be printed": (
        stage("added_tokens", [{"id": 5, "content": "x", "colour": "red"}]),
        "a token has a field 'colour'",
    ),
    "merges dropped by chance": (model(dropout=0.5), "its dropout is 0.5"),
    "special tokens that are a list": (content("special_tokens_map.json", b"[1]"), "can't be read"),
    "special tokens cut": (content("special_tokens_map.json", b"{"), "not valid JSON"),
    "added tokens cut": (content("added_tokens.json", b'{"x"'), "not valid JSON"),
}
HARMLESS: dict[str, Spoil] = {
    "padding to 10^12 tokens": stage(
        "padding",
        {
            "strategy": {"Fixed": 10**12},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    ),
    "truncation to no token": stage(
        "truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}
    ),
    "Llama's normalizer": normalizers(
        {"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581"), {"type": "NFKC"}
    ),
    "the normalizer that transformers makes of tokenizer.model": normalizers(
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(character_map({"\ufdfa": "x" * 33})).decode()},
        replace({"Regex": r"\A +| +\z"}, ""),
        replace({"Regex": " {2,}"}, " "),
        replace({"String": " "}, "\u2581"),
        replace({"Regex": "\\A\u2581"}, "\u2581\u2581"),
    ),
    "Llama 3's expression": split(LLAMA3_SPLIT),
    "tokens called like fields": model_tokens("content", "type", "single word"),
    "no dropout": model(dropout=0.0),
    "files that older releases named": settings(special_tokens_map_file="/root/map.json", tokenizer_file=None),
    "special tokens as they are in the wild": special(
        bos_token="<s>",
        eos_token={"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False},
        image_token="</s>",
        additional_special_tokens=["<s>", "</s>"],
    ),
    "a token with its type": settings(eos_token={"__type": "AddedToken", "content": "</s>", "normalized": False}),
    "listed tokens with their type": settings(
        additional_special_tokens=[{"__type": "AddedToken", "content": "</s>", "normalized": False}]
    ),
    "a class nobody knows": settings(tokenizer_class="Evil"),
    "windows line ends": lambda folder: (folder / TOKENIZER).write_text(
        json.dumps(json.loads((folder / TOKENIZER).read_text()), indent=1).replace("\n", "\r\n")
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tokenizer_is_refused(own_tiny: Path, cache: Path, name: str) -> None:
    spoil, words = BAD[name]
    spoil(own_tiny)
    check_refusal(own_tiny, cache, ModelError, words)


@pytest.mark.parametrize("name", HARMLESS)
def test_an_odd_tokenizer_counts_its_tokens(own_tiny: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And nothing is printed."""
    HARMLESS[name](own_tiny)
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        assert 0 < engine.count_tokens("Once upon a time") < 40
    assert capfd.readouterr().out == ""


def test_what_the_library_gives_up_on_is_a_typed_error(own_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its panics are no Exceptions. The expression is one that the check would refuse."""
    monkeypatch.setattr("hetero_ee.text.tokenizer_file.why_slow", lambda expression: None)
    split(r"(a+)+$")(own_tiny)
    with (
        Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine,
        pytest.raises(ModelError, match="the tokenizer fails on this prompt"),
    ):
        engine.generate("a" * 40 + "b")


def test_many_added_tokens_are_said_to_take_time(own_tiny: Path) -> None:
    said: list[str] = []
    settings(added_tokens_decoder=added(20_001))(own_tiny)
    Engine.from_pretrained(own_tiny, quantizer="none", threads=1, progress=lambda stage, *_: said.append(stage)).close()
    assert said.count("The tokenizer has 20,001 added tokens, so reading it needs some time") == 1


def test_a_class_that_knows_fewer_tokens_than_the_model_is_a_typed_error(own_tiny: Path) -> None:
    settings(tokenizer_class="ByT5Tokenizer")(own_tiny)
    with (
        Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine,
        pytest.raises(ModelError, match=r"the tokenizer fails on token \d+ \(bytes must be in range"),
    ):
        engine.generate([1000], max_new_tokens=20, ignore_eos=True)
