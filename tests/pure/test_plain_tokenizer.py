"""Tokenizers read without transformers: the same ids, texts and templates, or left to transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.text.plain_tokenizer import PlainTokenizer
from hetero_ee.text.tokenizer import Tokenizer

TEXTS = ("Once upon a time", " two  spaces\n\tand <s> a mark</s>", "e\u0301 \U0001f600 \u4f60\u597d", "")
SHORT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<s>",
}  # fmt: skip
Write = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, demo: Path) -> Write:
    """Write the demo model's tokenizer with changed settings, and with changed parts of tokenizer.json."""

    def write(settings: dict[str, Any] | None = None, **parts: Any) -> Path:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(demo / name, tmp_path)
        for name, changes in (("tokenizer_config.json", settings or {}), ("tokenizer.json", parts)):
            found = json.loads((tmp_path / name).read_text())
            (tmp_path / name).write_text(json.dumps(found | changes))
        return tmp_path

    return write


def added(folder: Path) -> list[dict[str, Any]]:
    tokens: list[dict[str, Any]] = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return tokens


def decoder(tokens: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The tokens as tokenizer_config.json lists them."""
    return {str(each["id"]): {name: each[name] for name in each if name != "id"} | changes for each in tokens}


def check_as_in_transformers(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    plain, theirs = PlainTokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert plain is not None
    for text in TEXTS:
        for with_special in (True, False):
            how = {"add_special_tokens": with_special, "return_offsets_mapping": True, "verbose": False}
            found, expected = plain(text, **how), theirs(text, **how)
            assert found == {name: expected[name] for name in found}
            for skips in (True, False):
                how_back = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
                assert plain.decode(found["input_ids"], **how_back) == theirs.decode(expected["input_ids"], **how_back)
    for name in ("eos_token_id", "special_tokens_map", "chat_template", "added_tokens_decoder"):
        assert getattr(plain, name) == getattr(theirs, name), name
    assert plain.convert_tokens_to_ids("</s>") == theirs.convert_tokens_to_ids("</s>")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, {}),
        ({"add_bos_token": True, "model_input_names": ["input_ids"]}, {"post_processor": None}),
        ({}, {"truncation": SHORT}),
        ({"eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}, "pad_token": None}, {}),
        ({"additional_special_tokens": ["<s>"]}, {}),
    ],
)
def test_ids_and_texts_are_those_of_transformers(
    folder: Write, settings: dict[str, Any], parts: dict[str, Any]
) -> None:
    check_as_in_transformers(folder(settings, **parts))


def test_settings_may_list_the_added_tokens_again(folder: Write, demo: Path) -> None:
    made = folder({"added_tokens_decoder": decoder(added(demo))})
    (made / "special_tokens_map.json").write_text('{"pad_token": "never read"}')
    check_as_in_transformers(made)


def test_a_template_in_the_settings_is_found(folder: Write) -> None:
    made = folder({"chat_template": "{{ messages }}"})
    (made / "chat_template.jinja").unlink()
    check_as_in_transformers(made)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"split_special_tokens": True},
        {"image_token": "<image>"},
        {"eos_token": "<|new|>"},
        {"eos_token": 5},
        {"eos_token": {"content": "</s>"}},
        {"additional_special_tokens": ["<|new|>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"chat_template": [{"name": "default", "template": "a"}]},
        {"added_tokens_decoder": {}},
        {"added_tokens_decoder": {"7": {"content": "<|new|>"}}},
    ],
)
def test_what_transformers_would_change_is_left_to_it(folder: Write, settings: dict[str, Any]) -> None:
    made = folder(settings)
    (made / "chat_template.jinja").unlink()
    assert PlainTokenizer.load(made) is None


def test_other_flags_of_added_tokens_are_left_to_transformers(folder: Write, demo: Path) -> None:
    assert PlainTokenizer.load(folder({"added_tokens_decoder": decoder(added(demo), lstrip=True)})) is None
    tokens = [each | {"special": False} for each in added(demo)]
    assert PlainTokenizer.load(folder(added_tokens=tokens)) is None


def test_a_padding_token_is_left_to_transformers(folder: Write) -> None:
    assert PlainTokenizer.load(folder(padding=PADDING)) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "additional_chat_templates"])
def test_files_that_transformers_merges_are_left_to_it(folder: Write, name: str) -> None:
    made = folder()
    if name.endswith(".json"):
        (made / name).write_text("{}")
    else:
        (made / name).mkdir()
    assert PlainTokenizer.load(made) is None


def test_the_demo_models_tokenizer_needs_no_transformers(demo: Path) -> None:
    assert isinstance(Tokenizer.load(demo, 32000)._backend, PlainTokenizer)
