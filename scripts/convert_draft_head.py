"""Write an EAGLE draft head that was published as a pickle as safetensors, which the engine reads.

    python scripts/convert_draft_head.py --head DIR --model DIR --output DIR

Opens the pickle with torch's `weights_only`, which builds tensors and calls nothing else; the engine itself never opens
one. --model: the model the head belongs to, whose shape and vocabulary the result is checked against.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hetero_ee.errors import HeteroError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.model_files import CONFIG_FILE, SINGLE_FILE
from hetero_ee.speculation.sources.draft_head_file import read_draft_head

PICKLE = "pytorch_model.bin"


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, each in memory of its own. Ends the script where it holds anything else."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile file makes torch raise
        reason = shown(next(iter(str(error).splitlines()), type(error).__name__))
        raise SystemExit(f"{file} can't be read as a pickle of tensors alone ({reason}).") from error
    if not isinstance(content, dict) or not all(isinstance(values, Tensor) for values in content.values()):
        raise SystemExit(f"{file} holds {shown(type(content).__name__)}, expected tensors by name.")
    return {str(name): values.clone().contiguous() for name, values in content.items()}


def convert(head: Path, model: Path, output: Path) -> None:
    """Writes config.json and model.safetensors, and reads them as the engine does; what it refuses is not kept."""
    tensors = read_pickle(head / PICKLE)
    output.mkdir(parents=True, exist_ok=True)
    written = [output / CONFIG_FILE, output / SINGLE_FILE]
    if existing := [file for file in written if file.exists()]:
        raise SystemExit(f"{existing[0]} is there already; give another --output.")
    shutil.copyfile(head / CONFIG_FILE, written[0])
    save_file(tensors, written[1])
    try:
        read_draft_head(output, read_spec(model))
    except HeteroError as error:
        for file in written:
            file.unlink()
        raise SystemExit(str(error)) from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a pickled EAGLE draft head to safetensors.")
    parser.add_argument("--head", type=Path, required=True, help=f"folder with {CONFIG_FILE} and {PICKLE}")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model that the head is for")
    parser.add_argument("--output", type=Path, required=True, help="folder for the result")
    arguments = parser.parse_args()
    convert(arguments.head, arguments.model, arguments.output)
    print(f"{arguments.output} is a draft head for {arguments.model}.")


if __name__ == "__main__":
    main()
