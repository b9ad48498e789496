"""Names of the files that make up a Hugging Face model, of which only safetensors are ever read as weights."""

from pathlib import Path

from hetero_ee.errors import ModelError
from hetero_ee.hub.regular_file import find_file

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them has to be there
SMALL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
MAX_SMALL_FILE_BYTES = 64 * 2**20


def require_tokenizer(folder: Path) -> None:
    """Raises ModelError where a model's folder has none of the files that a tokenizer is read from."""
    if not any(find_file(folder, name) for name in TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there.")
