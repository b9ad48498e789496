"""Names of the files of a Hugging Face model. Only safetensors files are ever read as weights."""

import re
from pathlib import Path

from hetero_ee.errors import CheckpointError, ModelError, shown
from hetero_ee.hub.json_text import not_json, parse_json
from hetero_ee.hub.regular_file import find_file, read_file

CONFIG_FILE = "config.json"
QUANTIZE_FILE = "quantize_config.json"  # of GPTQ checkpoints without quantization_config in config.json
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a model needs one of them
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
MAX_INDEX_BYTES = 32 * 2**20  # the largest published ones have about 15 MB
MAX_INDEX_VALUES = 10**6
NO_DEVICE = r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(?:[./]|$))"  # excludes names of devices on Windows
# A plain file name, without a leading dot or characters that a terminal or shell interprets.
_WEIGHT_FILE = re.compile(NO_DEVICE + r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}\.safetensors")


def require_tokenizer(folder: Path) -> None:
    """Check that a model folder has a file that a tokenizer can be read from. Raises ModelError."""
    if not any(find_file(folder, name) for name in TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}.")


def indexed_files(index: Path) -> list[str]:
    """Return the sorted names of the weight files in an index. Each must be a plain file name in the index's folder.

    Raises:
        CheckpointError: if the index cannot be read or names anything else.
    """
    data = read_file(index, MAX_INDEX_BYTES, "an index", CheckpointError)
    try:
        body = parse_json(data, MAX_INDEX_VALUES)
    except ValueError as error:
        raise CheckpointError(f"{index} {not_json(data, error)}.") from error
    file_of = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f"{index} holds no weight_map object that names tensors; get the file again.")
    for name in file_of.values():
        if not isinstance(name, str) or not _WEIGHT_FILE.fullmatch(name):
            raise CheckpointError(f"{index} names {shown(name)}; expected a .safetensors file in the same folder.")
    return sorted(set(file_of.values()))
