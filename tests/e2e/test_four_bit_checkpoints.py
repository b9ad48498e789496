"""4-bit checkpoints written tensor by tensor: awkward shapes, and what of them is kept in its own codes.

What holds for every quantized format is in test_packed_checkpoints.py.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_ee.weights.weight import TileWeight
from tests.bitsandbytes_files import FILE, NF4, edit, four_bits
from tests.packed_files import FourBits
from tests.quantized_checkpoints import converted, opened, relative_error, written

ODD = {"hidden_size": 45, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "intermediate_size": 75}


@pytest.mark.parametrize("block_size", [32, 64, 256])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_run_on_across_rows_of_any_length(tmp_path: Path, block_size: int, nested: bool) -> None:
    """45 x 75 weights: rows end inside of blocks, the last block is short and the last byte holds one code."""
    _, values = written(tmp_path, FourBits(block_size=block_size, nested=nested), sizes=ODD)
    checkpoint = opened(tmp_path)
    down = values["model.layers.0.mlp.down_proj.weight"]
    assert down.numel() % 2 == 1 and torch.equal(checkpoint.tensor("layers.0.ffn.down"), down)
    gate_up = torch.cat([values[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(checkpoint.tensor("layers.0.ffn.gate_up"), gate_up)


def test_matrices_are_unpacked_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_ee.weights.formats.bitsandbytes_4bit.CHUNK_ELEMENTS", 4096)
    _, values = written(tmp_path, FourBits(block_size=4096), sizes={"intermediate_size": 160})
    name = "layers.0.ffn.down"
    assert torch.equal(opened(tmp_path).tensor(name), values["model.layers.0.mlp.down_proj.weight"])
    tiles = opened(tmp_path).tiles(name)
    assert tiles is not None and relative_error(tiles.weight.dequantize(), opened(tmp_path).tensor(name)) < 6e-5


def test_where_groups_would_lie_in_two_blocks_the_default_quantizer_takes_over(tmp_path: Path) -> None:
    written(tmp_path, FourBits(), sizes=ODD)
    checkpoint, stored = opened(tmp_path), converted(tmp_path)
    assert checkpoint.tiles("layers.0.ffn.down") is None
    for name, matrix in stored.matrices.items():
        assert relative_error(matrix.dequantize(), checkpoint.tensor(name)) < 0.01, name


def test_of_a_matrix_with_parts_in_floats_nothing_is_kept(tmp_path: Path) -> None:
    """All of it is quantized alike, from the values of its parts; other matrices keep their codes."""
    _, values = written(tmp_path, FourBits(), kept=("k_proj", "o_proj"))
    checkpoint, saved = opened(tmp_path), load_file(tmp_path / FILE)
    values |= {name: tensor for name, tensor in saved.items() if "k_proj" in name}
    parts = [values[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(checkpoint.tensor("layers.0.attention.qkv"), torch.cat(parts))
    kept = {
        n: checkpoint.tiles(f"layers.0.{n}") for n in ("attention.qkv", "attention.output", "ffn.gate_up", "ffn.down")
    }
    assert [name for name, tiles in kept.items() if tiles is None] == ["attention.qkv", "attention.output"]
    stored = converted(tmp_path)
    for name, matrix in stored.matrices.items():
        assert isinstance(matrix, TileWeight)
        is_kept = matrix.codebook is not None and max(matrix.codebook) == 112
        assert is_kept == (kept.get(name.removeprefix("layers.0.")) is not None)


def test_each_matrix_has_a_table_of_its_own(tmp_path: Path) -> None:
    """Even one that has nothing to do with NF4; stacked parts with different ones are quantized again."""
    written(tmp_path, FourBits())
    before = opened(tmp_path)
    down, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "up"))
    table = torch.linspace(-1, 0.5, 16)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in (down, up):
            tensors[f"{name}.quant_map"] = table.clone()

    edit(tmp_path, change)
    after = opened(tmp_path)
    as_nf4, as_linear = before.tensor("layers.0.ffn.down"), after.tensor("layers.0.ffn.down")
    absmax = load_file(tmp_path / FILE)[f"{down}.absmax"].repeat_interleave(64).view_as(as_nf4)
    codes = ((as_nf4 / absmax)[:, :, None] - NF4).abs().argmin(-1)
    assert torch.equal(as_linear, table[codes] * absmax)
    tiles = after.tiles("layers.0.ffn.down")
    assert tiles is not None and relative_error(tiles.weight.dequantize(), as_linear) < 6e-5
    assert after.tiles("layers.0.ffn.gate_up") is None


def test_a_checkpoint_of_the_bare_decoder(tmp_path: Path) -> None:
    _, values = written(tmp_path, FourBits())
    tensors = load_file(tmp_path / FILE)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / FILE)
    down = opened(tmp_path).tensor("layers.0.ffn.down")
    assert torch.equal(down, values["model.layers.0.mlp.down_proj.weight"])


def test_a_head_in_4_bits_is_stored_in_8_like_any_other(tmp_path: Path) -> None:
    written(tmp_path, FourBits())

    def change(tensors: dict[str, Tensor]) -> None:
        saved, _ = four_bits("lm_head.weight", tensors["lm_head.weight"], "nf4", 64, nested=False)
        tensors.update(saved)

    edit(tmp_path, change)
    head = converted(tmp_path).matrices["head.tokens"]
    assert isinstance(head, TileWeight) and head.codebook is None
    assert relative_error(head.dequantize(), opened(tmp_path).tensor("head.tokens")) < 1e-4
