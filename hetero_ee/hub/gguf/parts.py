"""Read models that llama.cpp's gguf-split has cut into files, name-00001-of-00003.gguf and so on.

The first file has the model's metadata. Each file has the number of parts, its own number counted from 0, and the
number of tensors in all parts.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from hetero_ee.errors import CheckpointError, shown
from hetero_ee.hub.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from hetero_ee.hub.regular_file import find_file

MAX_PARTS = 512  # published models have up to some dozens
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


def base_name(file: PurePath) -> str:
    """Return the file's name without its suffix and part number."""
    found = _PART.fullmatch(file.name)
    return found[1] if found else file.stem


def part_names(name: str) -> list[str]:
    """Return the file names of all parts of the model that the file `name` belongs to; only `name` for a whole model.

    The list is empty if the numbers in the name are impossible.
    """
    found = _PART.fullmatch(name)
    if not found:
        return [name]
    number, n_parts = int(found[2]), int(found[3])
    if not 1 <= number <= n_parts <= MAX_PARTS:
        return []
    return [f"{found[1]}-{each:05}-of-{found[3]}.gguf" for each in range(1, n_parts + 1)]


def part_files(file: Path) -> list[Path]:
    """Return all parts of the model that `file` belongs to, in order; only the file itself if it is a whole model.

    Raises:
        CheckpointError: if a part is missing.
    """
    if not _PART.fullmatch(file.name):
        file = Path(os.path.realpath(file))
    if not _PART.fullmatch(file.name):
        return [file]
    names = part_names(file.name)
    if not names:
        raise CheckpointError(f"{file} has impossible part numbers in its name, expected 1 to {MAX_PARTS} parts.")
    folder = Path(os.path.realpath(file.parent))  # the file's own link stays: caches link to other names
    for each, name in enumerate(names, 1):
        if find_file(folder, name, CheckpointError) is None:
            raise CheckpointError(
                f"{folder / name} is missing, part {each} of {len(names)} of a model; put all parts into one folder."
            )
    return [folder / name for name in names]


def read_model_header(files: Sequence[Path]) -> GgufHeader:
    """Return the header of a model from its parts (see part_files). Raises CheckpointError if they are inconsistent."""
    return joined_header([read_gguf_header(file) for file in files])


def joined_header(headers: Sequence[GgufHeader]) -> GgufHeader:
    """Return the header of a model from those of its parts. Raises CheckpointError if they are inconsistent."""
    for index, header in enumerate(headers):
        _check_place(header, index, len(headers))
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for name in tensors.keys() & header.tensors.keys():
            raise CheckpointError(f"{header.file} has tensor {shown(name)}, which {tensors[name].file} has too.")
        tensors |= header.tensors
    for header in headers:
        n_tensors = header.metadata.get("split.tensors.count", len(tensors))
        if len(headers) > 1 and n_tensors != len(tensors):
            raise CheckpointError(
                f"{header.file} claims {shown(n_tensors)} tensors in all parts, but they have {len(tensors)}; "
                "get all parts again."
            )
    header_bytes = {header.file: header.header_bytes[header.file] for header in headers}
    return replace(headers[0], tensors=tensors, header_bytes=header_bytes)


def _check_place(header: GgufHeader, index: int, n_parts: int) -> None:
    """Check that a part's metadata has the number in its file name."""
    count, number = header.metadata.get("split.count", 0), header.metadata.get("split.no", 0)
    if n_parts == 1 and count in (0, 1):
        return
    if n_parts == 1:
        raise CheckpointError(
            f"{header.file} is one of {shown(count)} parts of a model, but not named so; expected a name such as "
            "model-00001-of-00003.gguf, with the other parts in the same folder."
        )
    if count != n_parts:
        raise CheckpointError(f"{header.file} is named as one of {n_parts} parts, but claims {shown(count)}.")
    if number != index:
        raise CheckpointError(f"{header.file} has part number {shown(number)}, expected {index} by its name.")
