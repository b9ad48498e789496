"""The index of a checkpoint in several files: which of them hold its tensors."""

import re
from pathlib import Path

from hetero_ee.errors import CheckpointError, shown
from hetero_ee.hub.json_text import not_json, parse_json
from hetero_ee.hub.regular_file import read_file

MAX_INDEX_BYTES = 32 * 2**20  # the largest published ones have about 15 MB
MAX_VALUES = 10**6
# No folder, no device of Windows (CON, NUL, COM1), no dot in front, nothing that a terminal or a shell acts upon.
_FILE_NAME = re.compile(r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)\.)[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}\.safetensors")


def indexed_files(index: Path) -> list[str]:
    """Names of the files that hold the tensors, in order, each a plain name beside the index.

    The index must be a regular file. Raises CheckpointError.
    """
    data = read_file(index, MAX_INDEX_BYTES, "an index", CheckpointError)
    try:
        body = parse_json(data, MAX_VALUES)
    except ValueError as error:
        raise CheckpointError(f"{index} {not_json(data, error)}.") from error
    file_of = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f"{index} holds no weight_map object that names tensors; get the file again.")
    for name in file_of.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{index} names {shown(name)}; expected the name of a .safetensors file beside it.")
    return sorted(set(file_of.values()))
