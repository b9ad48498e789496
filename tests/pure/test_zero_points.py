"""Zero points: from a file's codes to tiles, into a store and out of it, and where they are refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.costs.product import Product
from hetero_ee.errors import DamagedStoreError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.layers.tensors import TensorRole
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.hf_config import LAYOUTS_FIELD, spec_from_hf
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.gpu import GpuOps
from hetero_ee.planning.parts import model_parts
from hetero_ee.weights import blocks as block_tiles
from hetero_ee.weights.blocks import Blocks, RowBlocks
from hetero_ee.weights.model_weights import ModelWeights, as_stored
from hetero_ee.weights.random_weights import random_weights
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.reader import open_store
from hetero_ee.weights.store.verification import verify
from hetero_ee.weights.store.writer import StoreWriter
from hetero_ee.weights.tiles import ZEROS, tile_grid
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight
from hetero_ee_profiles.reference import derived_profile
from tests.families import config_of
from tests.shipped import DATA_SHEETS

QKV = "layers.0.attention.qkv"


def file_blocks(n_rows: int, *, with_zeros: bool = True, seed: int = 0) -> tuple[Blocks, Tensor]:
    """As GPTQ and AWQ have a matrix (n_rows, 96), w = s (q - z) with whole z of 0 to 15, and its weights in float64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n_rows, 96), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n_rows, 3, generator=generator).half().float() / 64
    zeros = (
        torch.randint(0, 16, (n_rows, 3), generator=generator).float() if with_zeros else torch.full((n_rows, 3), 8.0)
    )
    weights = scales.double().repeat_interleave(32, 1) * (codes.double() - zeros.double().repeat_interleave(32, 1))
    return Blocks(codes, scales, LINEAR_CODEBOOK, zeros - 8 if with_zeros else None), weights


def int4_tiles(parts: list[Blocks], *most: float) -> TileWeight | None:
    kept = block_tiles.kept_tiles("int4", [RowBlocks(len(part.codes), part.rows) for part in parts], *most)
    return kept and kept.weight


def test_whole_zero_points_are_kept_exactly() -> None:
    """Also beside parts without any, and in another order of rows."""
    (first, its_weights), (second, other_weights) = file_blocks(24), file_blocks(17, with_zeros=False, seed=1)
    tiles = int4_tiles([first, second], 0.0)
    assert tiles is not None and tiles.layout == ZEROS and tiles.shape == (41, 96)
    assert torch.equal(tiles.dequantize().double(), torch.cat([its_weights, other_weights]))
    assert torch.equal(first.dequantize().double(), its_weights)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    assert torch.equal(first.rows(order).dequantize(), first.dequantize()[order])


def test_codes_are_unpacked_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across parts that end within a tile. Memory never holds all codes unpacked."""
    parts = [file_blocks(24)[0], file_blocks(41, with_zeros=False, seed=1)[0], file_blocks(3, seed=2)[0]]
    whole, n_together = int4_tiles(parts, 0.0), list[int]()
    monkeypatch.setattr(block_tiles, "CHUNK_WEIGHTS", 32 * 96)

    def counted(part: Blocks, rows: slice | Tensor) -> Blocks:
        n_together.append(len(part.rows(rows).codes))
        return part.rows(rows)

    with ThreadPoolExecutor(2) as pool:
        lazy = [RowBlocks(len(part.codes), partial(counted, part)) for part in parts]
        kept = block_tiles.kept_tiles("int4", lazy, 0.0, workers=pool.map)
    assert whole is not None and kept is not None and max(n_together) <= 32 and len(n_together) > len(parts)
    assert torch.equal(kept.weight.tiles, whole.tiles) and torch.equal(kept.weight.scales, whole.scales)


def test_without_zero_points_tiles_are_as_ever() -> None:
    blocks, _ = file_blocks(16, with_zeros=False)
    tiles = int4_tiles([blocks], 0.0)
    assert tiles is not None and tiles.layout == "int4" and tiles.scales.shape == (1, 3, 16)


def test_zero_points_that_tiles_do_not_hold_are_refused() -> None:
    blocks, _ = file_blocks(16)
    assert blocks.zeros is not None
    third = replace(blocks, zeros=blocks.zeros + 1 / 3)
    assert int4_tiles([third], 0.0) is None and int4_tiles([third], 2.0**-11) is not None
    assert int4_tiles([replace(blocks, zeros=blocks.zeros * 1e6)], 2.0**-11) is None  # beyond fp16
    assert int4_tiles([replace(blocks, codebook=tuple(range(-9, 7)))], 0.0) is None
    for name in ("int5", "int6", "int8"):
        assert block_tiles.kept_tiles(name, [RowBlocks(16, blocks.rows)], 0.0) is None


def test_minimums_become_zero_points() -> None:
    """w = s q - m, as Q4_1 and Q4_K have it; a group without a scale, or with too small a one, is its minimum."""
    codes = torch.arange(5 * 32, dtype=torch.uint8).view(5, 32) % 16
    scales, minimums = (
        torch.tensor([[0.5], [0.0], [0.0], [1e-7], [-0.25]]),
        torch.tensor([[3.0], [2.0], [0], [1], [-2]]),
    )
    blocks = Blocks.with_minimums(codes, scales, minimums)
    expected = scales * codes - minimums
    assert torch.equal(blocks.dequantize()[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
    assert torch.equal(blocks.dequantize()[3], -torch.ones(32))
    tiles = int4_tiles([blocks], 2.0**-11)
    assert tiles is not None and torch.equal(tiles.dequantize(), blocks.dequantize())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["scales", "minimums"])
def test_minimums_that_are_no_numbers_are_seen(value: float, place: str) -> None:
    parts = {"scales": torch.ones(2, 1), "minimums": torch.ones(2, 1)}
    parts[place][1] = value
    blocks = Blocks.with_minimums(torch.zeros(2, 32, dtype=torch.uint8), **parts)
    assert blocks.scales.isfinite().flatten().tolist() == [True, False]


def test_a_zero_point_next_to_0_is_no_reason_to_round_the_codes() -> None:
    """fp16 has few bits for what is left of 8.0000005 - 8, and codes are 1 apart."""
    blocks, _ = file_blocks(16)
    near = replace(blocks, zeros=torch.full_like(blocks.scales, 5e-7))
    assert int4_tiles([near], 2.0**-11) is not None and int4_tiles([near], 0.0) is None


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, ModelSpec, ModelWeights]:
    """A tiny model whose first qkv has zero points, its weights at random."""
    config_of("llama-tied").save_pretrained(tmp_path)
    spec = replace(read_spec(tmp_path), matrix_layouts=((QKV, ZEROS),))
    return tmp_path, spec, random_weights(spec)


def written(model: tuple[Path, ModelSpec, ModelWeights], **changed: TileWeight) -> Path:
    folder, spec, weights = model
    with StoreWriter(folder / "store", FileSystem(), {}) as writer:
        for tensor in all_tensors(decoder_blocks(spec)):
            if tensor.name in weights.vectors:
                writer.add_values(tensor.name, weights.vectors[tensor.name])
            else:
                matrix = changed.get(tensor.name, weights.matrices[tensor.name])
                assert isinstance(matrix, TileWeight)
                writer.add_matrix(tensor.name, matrix)
        writer.copy_files(folder)
        return writer.finish("random", "int8", {})


def test_a_store_gives_back_the_bits(model: tuple[Path, ModelSpec, ModelWeights]) -> None:
    _, spec, weights = model
    store = written(model)
    found = open_store(store, replace(spec, matrix_layouts=()))
    assert as_stored(read_spec(store), found) == spec and not verify(store)
    for name, matrix in weights.matrices.items():
        assert torch.equal(found.matrices[name].dequantize(), matrix.dequantize())
    qkv = found.matrices[QKV]
    assert isinstance(qkv, TileWeight) and qkv.layout == ZEROS and qkv.scales.shape[2] == 32


def test_zero_points_of_an_embedding_are_refused(model: tuple[Path, ModelSpec, ModelWeights]) -> None:
    """Kernels that look up, and those of a head on a GPU, know of none."""
    _, spec, weights = model
    n_rows, n_columns = weights.matrices["embedding.tokens"].shape
    grid = tile_grid(n_rows, n_columns)
    codes, numbers = torch.zeros(*grid, 256, dtype=torch.uint8), torch.ones(*grid, 32).half()
    tiles = TileWeight(codes, numbers, 0, LINEAR_CODEBOOK, n_rows, n_columns)
    store = written(model, **{"embedding.tokens": tiles})
    with pytest.raises(DamagedStoreError, match=r"embedding\.tokens has zero points"):
        open_store(store, spec)


def test_a_plan_counts_5_bits_a_weight(model: tuple[Path, ModelSpec, ModelWeights]) -> None:
    _, spec, weights = model
    [qkv] = [tensor for tensor in all_tensors(decoder_blocks(spec)) if tensor.name == QKV]
    assert qkv.role is TensorRole.MATRIX_ZEROS
    with_zeros, plain = (model_parts(each, "fp16")[1].cost.product_bytes for each in (spec, spec.in_plain_int4))
    n_tiles = weights.matrices[QKV].n_bytes // 320
    assert with_zeros - plain == 32 * n_tiles
    assert Product(ZEROS, 4096, 4096).n_bytes == 4096 * 4096 * 5 // 8


def test_a_gpu_multiplies_them_by_what_takes_any_tiles(model: tuple[Path, ModelSpec, ModelWeights]) -> None:
    """Not by bitsandbytes, which may be what multiplies 4 bits."""
    operations: Any = SimpleNamespace(
        matmul_int4="int4", prepare_int4=lambda *_: "for int4", matmul_int8="any", prepare_int8=lambda *_: "for any"
    )
    matrices = model[2].matrices
    for name, expected in ((QKV, "any"), ("layers.1.attention.qkv", "int4"), ("embedding.tokens", "any")):
        found = GpuOps(operations, None).matrix(name, matrices[name], None)
        assert (found.multiply, found.matrix) == (expected, f"for {expected}")


def test_a_profile_times_them_by_their_bytes() -> None:
    """What a call takes is no matter of size."""
    times = derived_profile(DATA_SHEETS[0], "2026-11-24").cpu[0]
    call_s, plain_s = times.call.value, times.matmul_s("int4", 4096, 4096, 3)
    assert times.matmul_s(ZEROS, 4096, 4096, 3) == pytest.approx(call_s + (plain_s - call_s) * 5.0 / 4.5)


def test_a_configuration_names_the_matrices_with_zero_points() -> None:
    config = config_of("llama-tied").to_dict()
    assert spec_from_hf(config | {LAYOUTS_FIELD: {QKV: ZEROS}}, "x").matrix_layouts == ((QKV, ZEROS),)
    assert spec_from_hf(config, "x").matrix_layouts == ()
