"""Load a tokenizer.json with the tokenizers library, without importing transformers.

The import of transformers needs a second per start. It is not needed if transformers would use tokenizer.json
unchanged, which this module recognizes by the settings in tokenizer_config.json.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self

from hetero_ee.hub.model_files import MAX_SMALL_FILE_BYTES
from hetero_ee.hub.regular_file import read_file

# The classes of transformers that read tokenizer.json unchanged.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
# Settings that change neither token ids nor texts as this engine uses them.
IRRELEVANT = {
    *("tokenizer_class", "backend", "clean_up_tokenization_spaces", "model_max_length", "model_input_names"),
    *("is_local", "local_files_only"),
    *("add_bos_token", "add_eos_token"),  # transformers ignores them next to a tokenizer.json
}
KNOWN = {*IRRELEVANT, *NAMED_TOKENS, *TOKEN_LISTS, "added_tokens_decoder", "chat_template"}
FLAGS = ("lstrip", "normalized", "rstrip", "single_word")  # flags of an added token
# Files that transformers merges into the tokenizer unless the settings list the added tokens.
MERGED_FILES = ("special_tokens_map.json", "added_tokens.json")
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"


class PlainTokenizer:
    """A tokenizer.json with its special tokens. Has the methods of transformers' classes that Tokenizer calls."""

    is_fast = True

    def __init__(self, backend: Any, special_tokens: dict[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer, self.special_tokens_map, self.chat_template = backend, special_tokens, chat_template
        backend.no_truncation()

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Load the tokenizer in `folder`. Return None if transformers might not use tokenizer.json unchanged."""
        config = tokenizer_config(folder)
        if not is_plain(config, folder) or not KNOWN.issuperset(config) or (folder / TEMPLATE_FOLDER).exists():
            return None
        if "added_tokens_decoder" not in config and any((folder / name).exists() for name in MERGED_FILES):
            return None
        template_file = folder / TEMPLATE_FILE
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        special_tokens = {name: _content(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
        lists = [config.get(name) or [] for name in TOKEN_LISTS]
        if not isinstance(template, str | None) or not all(isinstance(tokens, list) for tokens in lists):
            return None
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = {token_id: _fields(token) for token_id, token in backend.get_added_tokens_decoder().items()}
        special = {each["content"]: any(each[flag] for flag in FLAGS) for each in added.values() if each["special"]}
        # transformers adds other tokens than these, or changes their flags.
        if not special.keys() >= {*special_tokens.values()} or any(special.get(str(t), True) for t in chain(*lists)):
            return None
        decoder = config.get("added_tokens_decoder")
        if decoder is not None and decoder != {str(token_id): fields for token_id, fields in added.items()}:
            return None
        if backend.padding is not None:  # transformers makes its token a special one
            return None
        return cls(backend, special_tokens, template)

    def __call__(
        self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool, verbose: bool
    ) -> Mapping[str, Any]:
        """Return input_ids and, if requested, the offset_mapping of a text. `verbose` changes nothing."""
        found = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        offsets = {"offset_mapping": found.offsets} if return_offsets_mapping else {}
        return {"input_ids": found.ids} | offsets

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces, "it would remove spaces that the model wrote"
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        found: int | None = self.backend_tokenizer.token_to_id(token)
        return found

    def get_vocab(self) -> dict[str, int]:
        found: dict[str, int] = self.backend_tokenizer.get_vocab()
        return found

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    @property
    def eos_token_id(self) -> int | None:
        eos = self.special_tokens_map.get("eos_token")
        return None if eos is None else self.convert_tokens_to_ids(eos)


def tokenizer_config(folder: Path) -> Any:
    """Return the content of tokenizer_config.json, {} without such a file."""
    file = folder / "tokenizer_config.json"
    return json.loads(read_file(file, MAX_SMALL_FILE_BYTES, "such a file")) if file.is_file() else {}


def is_plain(config: Any, folder: Path) -> bool:
    """Return whether transformers would use tokenizer.json unchanged with these settings."""
    return config.get("tokenizer_class") in PLAIN_CLASSES and (folder / "tokenizer.json").is_file()


def _content(token: Any) -> str:
    """Return the text of a special token in the settings, which is a string or an object; "" for anything else."""
    text = token.get("content") if isinstance(token, dict) and "__type" in token else token
    return text if isinstance(text, str) else ""


def _fields(token: Any) -> dict[str, Any]:
    return {name: getattr(token, name) for name in ("content", "special", *FLAGS)}
