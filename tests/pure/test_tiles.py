"""The tile layouts: golden bytes, the formula in plain loops, round trips, and what a weight reads from them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.weight import LINEAR_CODEBOOK, DenseWeight, TileWeight

GOLDEN = Path(__file__).parents[1] / "golden"
BLOCKS = st.integers(1, 4)
CODEBOOK = (-127, -96, -71, -52, -38, -26, -15, -5, 4, 14, 25, 37, 51, 70, 95, 126)


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / name).read_text())


def golden_codes() -> Tensor:
    n, k = torch.meshgrid(torch.arange(32), torch.arange(64), indexing="ij")
    return ((5 * n + 3 * k + n * k // 7) % 16).to(torch.uint8)


def golden_values() -> Tensor:
    n, k = torch.meshgrid(torch.arange(32), torch.arange(64), indexing="ij")
    return ((13 * n + 7 * k + n * k) % 256 - 128).to(torch.int8)


def golden_scales() -> Tensor:
    n, g = torch.meshgrid(torch.arange(32), torch.arange(2), indexing="ij")
    return ((n - 11) * 2.0 ** (g - 3)).half()


def random_codes(n_rows: int, n_columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (n_rows, n_columns), generator=generator, dtype=torch.uint8)


def random_values(n_rows: int, n_columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (n_rows, n_columns), generator=generator, dtype=torch.int8)


def tile_weight(kind: str, n_rows: int, n_columns: int, exponent: int = -20) -> TileWeight:
    """Random tiles and scales; the padding is random too, because nobody may look at it."""
    padded_rows, padded_columns = layout.padded_shape(n_rows, n_columns)
    generator = torch.Generator().manual_seed(n_rows * 1000 + n_columns)
    scales = torch.randn(padded_rows, padded_columns // 32, generator=generator).half()
    if kind == "int4":
        tiles, codebook = layout.pack_int4(random_codes(padded_rows, padded_columns)), CODEBOOK
    elif kind == layout.ZEROS:
        tiles, codebook = layout.pack_int4(random_codes(padded_rows, padded_columns)), LINEAR_CODEBOOK
        zeros = (torch.randn(scales.shape, generator=generator) * 3).half()
        return TileWeight(tiles, layout.pack_scales(scales, zeros), exponent, codebook, n_rows, n_columns)
    else:
        tiles, codebook = layout.pack_int8(random_values(padded_rows, padded_columns)), None
    return TileWeight(tiles, layout.pack_scales(scales), exponent, codebook, n_rows, n_columns)


def test_packing_gives_the_golden_bytes() -> None:
    assert layout.pack_int4(golden_codes()).numpy().tobytes() == golden("int4_tiles.hex")
    assert layout.pack_int8(golden_values()).numpy().tobytes() == golden("int8_tiles.hex")
    assert layout.pack_scales(golden_scales()).numpy().tobytes() == golden("scales.hex")


def test_zero_points_lie_after_the_scales_of_their_tile() -> None:
    zeros = (golden_scales() + 64).half()
    data = layout.pack_scales(golden_scales(), zeros).numpy().tobytes()
    assert data == golden("zero_points.hex") and len(data) == 2 * len(golden("scales.hex"))
    for tile in range(4):
        assert data[64 * tile : 64 * tile + 32] == golden("scales.hex")[32 * tile : 32 * tile + 32]
    packed = torch.tensor(list(data), dtype=torch.uint8).view(torch.float16).view(2, 2, 32)
    assert torch.equal(layout.unpack_scales(packed), golden_scales())
    assert torch.equal(layout.scales_of_rows(packed), torch.stack([golden_scales(), zeros], 2))


def test_a_weight_with_zero_points_is_scale_times_what_is_left_of_the_code() -> None:
    weight = tile_weight(layout.ZEROS, 40, 100, exponent=-3)
    dense, codes, scales = weight.dequantize(), layout.unpack(weight.tiles), layout.unpack_scales(weight.scales)
    zeros = layout.scales_of_rows(weight.scales)[..., 1]
    assert weight.layout == layout.ZEROS and weight.n_bytes == 3 * 4 * (256 + 64)
    for n, k in ((0, 0), (39, 99), (17, 33)):
        entry = torch.tensor(int(codes[n, k]) - 8.0) - zeros[n, k // 32].float()
        assert dense[n, k] == entry * (scales[n, k // 32].float() / 8)


@pytest.mark.parametrize("kind", ["int4", layout.ZEROS, "int8"])
def test_a_row_is_read_without_the_others_of_its_tiles(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The import report reads 64 rows of every matrix."""
    weight = tile_weight(kind, 40, 100)
    indices = torch.tensor([39, 0, 17, 17])
    expected = weight.dequantize()[indices]
    monkeypatch.setattr(layout, "_lines", None)  # of all rows
    assert torch.equal(weight.rows(indices), expected)


def test_unpacking_the_golden_bytes_gives_the_matrices() -> None:
    int4 = torch.tensor(list(golden("int4_tiles.hex")), dtype=torch.uint8).view(2, 2, 256)
    int8 = torch.tensor(list(golden("int8_tiles.hex")), dtype=torch.uint8).view(torch.int8).view(2, 2, 512)
    scales = torch.tensor(list(golden("scales.hex")), dtype=torch.uint8).view(torch.float16).view(2, 2, 16)
    assert torch.equal(layout.unpack(int4), golden_codes())
    assert torch.equal(layout.unpack(int8), golden_values())
    assert torch.equal(layout.unpack_scales(scales), golden_scales())


def test_golden_bytes_follow_the_formula() -> None:
    """byte 4r + c of line j, in loops over plain numbers: nothing of the packing code takes part."""
    codes, values = golden_codes().tolist(), golden_values().tolist()
    int4, int8 = golden("int4_tiles.hex"), golden("int8_tiles.hex")
    for b, g, r, c in ((b, g, r, c) for b in range(2) for g in range(2) for r in range(16) for c in range(4)):
        tile = 2 * b + g
        for j in range(4):
            byte = int4[256 * tile + 64 * j + 4 * r + c]
            assert byte & 15 == codes[16 * b + r][32 * g + 4 * j + c]
            assert byte >> 4 == codes[16 * b + r][32 * g + 16 + 4 * j + c]
        for j in range(8):
            assert int8[512 * tile + 64 * j + 4 * r + c] == values[16 * b + r][32 * g + 4 * j + c] % 256


@given(BLOCKS, BLOCKS, st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_packing_and_unpacking_cancel(n_blocks: int, n_groups: int, seed: int) -> None:
    codes = random_codes(16 * n_blocks, 32 * n_groups, seed)
    values = random_values(16 * n_blocks, 32 * n_groups, seed)
    scales = codes[:, :n_groups].half()
    tiles = layout.pack_int4(codes)
    assert tiles.shape == (n_blocks, n_groups, 256) and tiles.dtype == torch.uint8
    assert torch.equal(layout.unpack(tiles), codes)
    assert torch.equal(layout.unpack(layout.pack_int8(values)), values)
    assert layout.pack_scales(scales).shape == (n_blocks, n_groups, 16)
    assert torch.equal(layout.unpack_scales(layout.pack_scales(scales)), scales)


@given(st.binary(min_size=512, max_size=512))
@settings(max_examples=25, deadline=None)
def test_every_byte_string_is_a_tile(data: bytes) -> None:
    """No byte has two meanings and none is lost: unpacking and packing give it back."""
    raw = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(layout.pack_int4(layout.unpack(raw.view(2, 1, 256))).flatten(), raw)
    int8 = raw.view(torch.int8).view(1, 1, 512)
    assert torch.equal(layout.pack_int8(layout.unpack(int8)), int8)


@pytest.mark.parametrize(
    ("shape", "padded"), [((1, 1), (16, 32)), ((16, 32), (16, 32)), ((17, 33), (32, 64)), ((131, 48), (144, 64))]
)
def test_padded_shape_is_the_next_whole_tile(shape: tuple[int, int], padded: tuple[int, int]) -> None:
    assert layout.padded_shape(*shape) == padded


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (15, 31), (17, 33), (40, 100)])
def test_a_weight_is_exponent_times_scale_times_entry(kind: str, shape: tuple[int, int]) -> None:
    weight = tile_weight(kind, *shape)
    dense = weight.dequantize()
    assert dense.shape == weight.shape == shape and dense.dtype == torch.float32
    scales = layout.unpack_scales(weight.scales).tolist()
    entries = layout.unpack(weight.tiles)
    for n, k in {(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 2), (0, shape[1] - 1)}:
        entry = int(entries[n, k]) if kind == "int8" else CODEBOOK[int(entries[n, k])]
        assert dense[n, k].item() == 2.0**-20 * scales[n][k // 32] * entry  # exact: 11 and 8 significant bits


@pytest.mark.parametrize("kind", ["int4", layout.ZEROS, "int8"])
@given(st.integers(1, 70), st.integers(1, 70), st.data())
@settings(max_examples=15, deadline=None)
def test_rows_are_the_bits_of_the_whole(kind: str, n_rows: int, n_columns: int, data: st.DataObject) -> None:
    weight = tile_weight(kind, n_rows, n_columns, exponent=3)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, n_rows - 1), min_size=1, max_size=9)))
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])


@pytest.mark.parametrize("kind", ["int4", layout.ZEROS, "int8"])
@pytest.mark.parametrize("ids", [[0], [39, 3, 3], list(range(40))])
def test_gathered_rows_are_a_matrix_of_the_same_bits(kind: str, ids: list[int]) -> None:
    weight = tile_weight(kind, 40, 70)
    gathered = weight.gathered(torch.tensor(ids))
    assert gathered.shape == (len(ids), 70) and gathered.codebook == weight.codebook
    assert torch.equal(gathered.dequantize(), weight.dequantize()[ids])
    assert gathered.tiles.is_contiguous() and gathered.scales.is_contiguous()


def test_rows_of_a_dense_weight() -> None:
    weight = DenseWeight(torch.randn(7, 5))
    ids = torch.tensor([6, 0, 6])
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])
    assert weight.shape == (7, 5) and weight.n_bytes == 7 * 5 * 4


@pytest.mark.parametrize("shape", [(16, 32), (64, 96), (4096, 32)])
def test_bits_a_weight(shape: tuple[int, int]) -> None:
    n_weights = shape[0] * shape[1]
    assert tile_weight("int4", *shape).n_bytes * 8 == 4.5 * n_weights
    assert tile_weight(layout.ZEROS, *shape).n_bytes * 8 == 5.0 * n_weights
    assert tile_weight("int8", *shape).n_bytes * 8 == 8.5 * n_weights
