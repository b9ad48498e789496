"""The model that the tests of Hugging Face ids publish, and how they open it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_ee.hub.resolve import resolve_model

ID = "some-org/Tiny-0.1B"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Calls:
    """What progress was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, n_done: int, n_all: int) -> None:
        self.calls.append((stage, n_done, n_all))


def resolve(model: str | Path = ID, **options: Any) -> Path:
    """resolve_model of this model, unless of another."""
    return resolve_model(model, **options)


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of every file, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def in_shards(files: Mapping[str, bytes], n_shards: int = 3) -> dict[str, bytes]:
    """The same model with its weights in several files."""
    from safetensors.torch import load, save

    tensors = load(files[SINGLE])
    names = sorted(tensors)
    own = {f"model-{i + 1:05}-of-{n_shards:05}.safetensors": names[i::n_shards] for i in range(n_shards)}
    index = {"metadata": {}, "weight_map": {name: shard for shard, mine in own.items() for name in mine}}
    shards = {shard: save({name: tensors[name] for name in mine}) for shard, mine in own.items()}
    return {name: files[name] for name in files if name != SINGLE} | {INDEX: json.dumps(index).encode()} | shards
