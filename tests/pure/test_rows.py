"""The row layout: the formula in plain loops, golden bytes, and the same weights as in tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.weights import rows as layout
from hetero_ee.weights.quantizers import quantize
from tests.pure.test_tiles import golden, golden_codes, random_codes


def test_packing_gives_the_golden_bytes() -> None:
    assert bytes(layout.pack_rows(golden_codes()).flatten().tolist()) == golden("int4_rows.hex")


def test_bytes_are_where_the_page_says() -> None:
    codes = random_codes(3, 192)
    packed = layout.pack_rows(codes)
    for n in range(3):
        for u in range(3):
            for b in range(32):
                byte = int(packed[n, 32 * u + b])
                assert (byte & 15, byte >> 4) == (codes[n, 64 * u + b], codes[n, 64 * u + 32 + b])
    assert torch.equal(layout.unpack_rows(packed), codes)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200))
def test_rows_are_the_weights_that_tiles_are(n_rows: int, n_columns: int) -> None:
    generator = torch.Generator().manual_seed(n_rows * 1000 + n_columns)
    tiles = quantize(torch.randn(n_rows, n_columns, generator=generator), "search")
    rows = layout.in_rows(tiles)
    assert rows.shape == tiles.shape and torch.equal(rows.dequantize(), tiles.dequantize())
    chosen = torch.arange(n_rows)[::3]
    assert torch.equal(rows.rows(chosen), rows.dequantize()[chosen])
    assert (rows.codes.nbytes, rows.scales.nbytes) == layout.row_sizes(n_rows, n_columns)
    assert not rows.scales[:, -(-n_columns // 32) :].any(), "padding has no scale"


def test_wide_codebooks_and_bytes_are_refused() -> None:
    weight = torch.randn(16, 64)
    for quantizer in ("nf4", "int8"):
        if quantizer == "nf4":
            pytest.importorskip("bitsandbytes")
        with pytest.raises(ValueError, match="-32 to 32"):
            layout.in_rows(quantize(weight, quantizer))
