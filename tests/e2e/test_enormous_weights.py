"""Weights beyond fp16's range are no model's: a store of them is neither written nor opened."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hetero_ee import CheckpointError
from tests.store_support import contents, made_store, one_layer_model


def test_a_checkpoint_with_enormous_weights_is_not_converted(tmp_path: Path) -> None:
    file = one_layer_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"] *= 2.0**40
    save_file(tensors, file)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.down has weights of 2\^\d+ and more"):
        made_store(tmp_path, tmp_path / "store")
    assert contents(tmp_path) == before
