"""Load the model's tokenizer, and convert exceptions of the libraries that read it to ModelError."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

from hetero_ee.errors import ModelError, UsageError, shown
from hetero_ee.hub.model_files import require_tokenizer
from hetero_ee.text.plain_tokenizer import PlainTokenizer, is_plain, tokenizer_config
from hetero_ee.text.sentencepiece_file import check_sentencepiece
from hetero_ee.text.tokenizer_file import Warn, check_converted, check_tokenizer_files


class Tokenizer:
    """Converts text to token ids and back."""

    def __init__(self, backend: Any, vocab_size: int) -> None:
        self._backend, self._vocab_size = backend, vocab_size

    @classmethod
    def load(cls, folder: Path, vocab_size: int, warn: Warn = lambda text: None) -> "Tokenizer":
        """Load the tokenizer files in `folder`, without running code from the folder. Raises ModelError."""
        require_tokenizer(folder)
        check_tokenizer_files(folder, warn)
        check_sentencepiece(folder)
        with _model_errors(f"the tokenizer in {folder} can't be read"):
            backend = _load_backend(folder)
        if not _has_tokenizer_json(folder):
            check_converted(backend, folder)
        return cls(backend, vocab_size)

    def encode(self, text: str, *, with_special_tokens: bool = True, mark: str = "") -> list[int]:
        """Return the text's token ids, with a begin token if the model expects one.

        Args:
            with_special_tokens: False adds none, for a text that contains them already, such as a rendered chat
                template.
            mark: a character whose tokens are left out; see chat_prompt.py.

        Raises:
            UsageError, ModelError: if the text is not valid, or the tokenizer fails.
        """
        if not isinstance(text, str):
            raise UsageError(f"a prompt is a string, got {type(text).__name__}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt is not valid Unicode at character {error.start}.") from error
        with _model_errors("the tokenizer fails on this prompt"):
            has_offsets = bool(mark) and bool(self._backend.is_fast)  # other tokenizers keep the marks
            how = {"add_special_tokens": with_special_tokens, "return_offsets_mapping": has_offsets}
            encoded = self._backend(text, verbose=False, **how)
        ids = list(encoded["input_ids"])
        if has_offsets:
            pairs = zip(ids, encoded["offset_mapping"], strict=True)
            ids = [each for each, (begin, end) in pairs if begin == end or text[begin:end].strip(mark)]
        if max(ids, default=0) >= self._vocab_size:  # ids may have gaps; checking all of them at loading takes 0.2 s
            raise ModelError(f"the tokenizer gives token {max(ids)}, but the model has only {self._vocab_size}.")
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the ids without special tokens. Raises ModelError for unknown ids."""
        return self._decoded(token_ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token in the middle of a text, with its leading space, or a special token's name."""
        # Some decoders strip the beginning of a text, so the second of two tokens is used.
        once, twice = (self._decoded(ids, skip_special_tokens=False) for ids in ([token_id], [token_id, token_id]))
        return twice[len(once) :]

    def pieces(self) -> list[str | None]:
        """Return the name of each token as the tokenizer's file has it, by id; None for unused ids."""
        by_id = {token_id: piece for piece, token_id in self._backend.get_vocab().items()}
        return [by_id.get(token_id) for token_id in range(max(by_id, default=-1) + 1)]

    def _decoded(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        try:
            return str(self._backend.decode(token_ids, **options))
        except Exception as error:
            raise ModelError(f"the tokenizer fails on token {token_ids[-1]} ({_first_line(error)}).") from error

    def as_json(self) -> str:
        """Return the content of tokenizer.json, with added tokens. Raises UsageError for a Python tokenizer."""
        backend = getattr(self._backend, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(
                "this model's tokenizer is Python code, but a grammar needs one of the tokenizers library."
            )
        return str(backend.to_str())

    def special_token_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, which decode() leaves out; None if there is none."""
        found = self._backend.convert_tokens_to_ids(text)
        added = self._backend.added_tokens_decoder.get(found) if isinstance(found, int) else None
        return found if added is not None and added.content == text and added.special else None

    @cached_property
    def special_texts(self) -> re.Pattern[str] | None:
        """Pattern of the special tokens' texts, None if there are none. Matching is linear in a text's length."""
        tokens = self._backend.added_tokens_decoder.values()
        texts = {each.content for each in tokens if each.special and len(each.content) > 1}
        return re.compile(_one_of(texts)) if texts else None

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._backend.eos_token_id
        return token_id

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names in tokenizer_config.json, such as bos_token."""
        return {name: text for name, text in self._backend.special_tokens_map.items() if isinstance(text, str)}

    @property
    def chat_template(self) -> str | None:
        """Chat template of chat_template.jinja or tokenizer_config.json; the default of several. Raises ModelError."""
        template = self._backend.chat_template
        if isinstance(template, dict):
            if "default" not in template:
                raise ModelError(
                    f"the tokenizer has {len(template)} chat templates ({shown(', '.join(template))}), none of them "
                    "called default; choose one with chat_template."
                )
            template = template["default"]
        if template is not None and not isinstance(template, str):
            raise ModelError(f"the tokenizer's chat template is {shown(template)}, not text.")
        return template


def _one_of(words: Collection[str]) -> str:
    """Return an expression for any of the words that tries one branch per character. With |, it would try all words."""
    prefix = commonprefix(list(words))  # noqa: RUF071 - of characters, not of paths
    after: dict[str, set[str]] = {}
    for rest in (word[len(prefix) :] for word in words):
        after.setdefault(rest[:1], set()).add(rest)
    is_whole = after.pop("", None) is not None
    branches = "|".join(map(_one_of, after.values()))
    return re.escape(prefix) + (f"(?:{branches}){'?' if is_whole else ''}" if branches else "")


def _has_tokenizer_json(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def _load_backend(folder: Path) -> Any:
    if (plain := PlainTokenizer.load(folder)) is not None:
        return plain
    import transformers

    # Bypassing AutoTokenizer saves its imports: 1.5 s per start (2-core Zen 5, 2026-11-21). Other classes need it.
    is_bypassed = is_plain(tokenizer_config(folder), folder)
    loader = transformers.PreTrainedTokenizerFast if is_bypassed else transformers.AutoTokenizer
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    finally:
        transformers.logging.set_verbosity(verbosity)


@contextmanager
def _model_errors(sentence: str) -> Iterator[None]:
    """Convert everything that the tokenizers library raises, except for MemoryError, to ModelError.

    The library raises bare Exceptions for malformed files, and Rust panics, which do not derive from Exception.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if isinstance(error, MemoryError) or not (is_panic or isinstance(error, Exception)):
            raise
        raise ModelError(f"{sentence} ({_first_line(error)}).") from error


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return line if line.isprintable() else ascii(line)
