"""Names of the files that make up a Hugging Face model, of which only safetensors are ever read as weights."""

import re
from pathlib import Path

from hetero_ee.errors import CheckpointError, ModelError, shown
from hetero_ee.hub.json_text import not_json, parse_json
from hetero_ee.hub.regular_file import find_file, read_file

CONFIG_FILE = "config.json"
QUANTIZE_FILE = "quantize_config.json"  # of GPTQ checkpoints older than config.json's quantization_config
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
MAX_INDEX_BYTES = 32 * 2**20  # the largest published ones have about 15 MB
MAX_INDEX_VALUES = 10**6
NO_DEVICE = r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(?:[./]|$))"  # in front of a name that Windows must take as a file's
# No folder, no dot in front, nothing that a terminal or a shell acts upon.
_WEIGHT_FILE = re.compile(NO_DEVICE + r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}\.safetensors")


def require_tokenizer(folder: Path) -> None:
    """Raises ModelError where a model's folder has none of the files that a tokenizer is read from."""
    if not any(find_file(folder, name) for name in TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there.")


def indexed_files(index: Path) -> list[str]:
    """Names of the files that hold the tensors, in order, each a plain name beside the index.

    The index must be a regular file. Raises CheckpointError.
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
            raise CheckpointError(f"{index} names {shown(name)}; expected the name of a .safetensors file beside it.")
    return sorted(set(file_of.values()))
