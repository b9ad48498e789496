"""The model's tokenizer, by transformers; its errors become ours."""

import json
from pathlib import Path
from typing import Any

from hetero_ee.errors import ModelError, UsageError
from hetero_ee.weights.store import copied_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
MAX_TOKENIZER_BYTES = 100 * 2**20
# These two names mean "tokenizer.json as it is". Going past AutoTokenizer saves 1.5 s of its imports at every start
# (2-core Zen 5, 2026-11-21); every other class needs the auto mapping.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, backend: Any, vocab_size: int) -> None:
        self._backend, self._vocab_size = backend, vocab_size

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> "Tokenizer":
        """Reads the tokenizer files in `folder`; runs no code from there. Raises ModelError."""
        present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        if not present:
            raise ModelError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there.")
        for file in copied_files(folder):
            if file.stat().st_size > MAX_TOKENIZER_BYTES:
                raise ModelError(
                    f"{file} has {file.stat().st_size} bytes; a tokenizer has at most {MAX_TOKENIZER_BYTES}."
                )
        try:
            backend = _load_backend(folder)
        except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
            raise ModelError(f"the tokenizer in {folder} can't be read ({_first_line(error)}).") from error
        return cls(backend, vocab_size)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the leading begin token where the model wants one. Raises UsageError, ModelError."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt is not valid Unicode at character {error.start}.") from error
        ids = list(self._backend(text)["input_ids"])
        if max(ids, default=0) >= self._vocab_size:  # ids may have gaps; looking at all when loading takes 0.2 s
            raise ModelError(f"the tokenizer gives token {max(ids)}, the model has only {self._vocab_size}.")
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of the ids; special tokens are left out."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._backend.eos_token_id
        return token_id


def _load_backend(folder: Path) -> Any:
    import transformers

    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    is_plain = config.get("tokenizer_class") in PLAIN_CLASSES and (folder / "tokenizer.json").is_file()
    loader = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
