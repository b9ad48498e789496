"""What the tests of quantized checkpoints share: their sizes, what is read of them, and how they fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_ee.errors import ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import ModelWeights, load_dense
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store
from tests.bitsandbytes_files import FILE
from tests.families import random_model, save_checkpoint
from tests.packed_files import Format, pack_checkpoint

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 96}
DOWN = "model.layers.0.mlp.down_proj"  # 64 x 96: 3 groups of 32, 96 blocks of 64
Change = Callable[[dict[str, Tensor]], Any]


def written(folder: Path, format_: Format, family: str = "llama", **how: Any) -> tuple[Any, dict[str, Tensor]]:
    """A random model in that format in `folder`; the transformers model with the values that the file has."""
    model = random_model(family, **(SIZES | how.pop("sizes", {})))
    save_checkpoint(model, folder)
    values = pack_checkpoint(folder, format_, **how)
    model.load_state_dict(values, strict=False)
    return model, values


def opened(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_spec(folder))


def kept(folder: Path, quantizer: str | None = None) -> Path:
    """The store that conversion makes in the checkpoint's folder."""
    return convert(folder, read_spec(folder), folder / "store", Quantization.of_model(folder, quantizer))


def converted(folder: Path, quantizer: str | None = None) -> ModelWeights:
    return open_store(kept(folder, quantizer), read_spec(folder))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).square().sum() / expected.double().square().sum())


def in_two_files(folder: Path) -> dict[str, str]:
    """Spreads neighbouring tensors over two files. Returns each one's file."""
    tensors = load_file(folder / FILE)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / FILE).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return files


def refusal(folder: Path, error: type[ModelError] = ModelError) -> str:
    """The one sentence that reading the values and keeping the codes both end with; nothing is left behind."""
    sentences = []
    for use in (lambda: load_dense(opened(folder)), lambda: kept(folder)):
        with pytest.raises(error) as caught:
            use()
        sentences.append(str(caught.value))
    sentence, other = sentences
    assert sentence == other
    assert sentence.isprintable() and sentence.endswith(".") and str(folder) in sentence
    assert len(sentence) < 400 + len(str(folder))
    assert not (folder / "store").exists() and not list(folder.glob("*.partial"))
    return sentence


def replaced(suffix: str, make: Callable[[Tensor], Tensor]) -> Change:
    """Another tensor in the place of DOWN + suffix, made from it."""
    return lambda tensors: tensors.update({DOWN + suffix: make(tensors[DOWN + suffix]).contiguous()})


def removed(suffix: str) -> Change:
    return lambda tensors: tensors.pop(DOWN + suffix)


def with_value(suffix: str, value: float, *index: int) -> Change:
    def make(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[index] = value
        return changed

    return replaced(suffix, make)
