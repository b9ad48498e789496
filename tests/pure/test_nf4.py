"""The nf4 quantizer: bitsandbytes' codes and scales, its table in int8; and any table of 16 values as a codebook."""

import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.errors import UsageError
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import quantize, table_codebook, unpacked
from tests.bitsandbytes_files import FP4, NF4, TABLES
from tests.pure.test_quantizers import NF4_CODEBOOK, gaussian, nmse

QUIET = """
import torch
from hetero_ee.weights.quantizers import quantize
quantize(torch.ones(1, 32), "nf4")
"""


@pytest.mark.parametrize("shape", [(16, 32), (40, 352), (33, 70)])
def test_codes_and_scales_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    """Of the matrix padded to whole groups, quantized in one piece, whatever the chunks."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = gaussian(*shape)
    n_rows, n_columns = layout.padded_shape(*shape)
    padded = torch.nn.functional.pad(weight, (0, n_columns - shape[1], 0, n_rows - shape[0]))
    packed, state = quantize_4bit(padded, blocksize=32, quant_type="nf4")
    quantized = quantize(weight, "nf4")
    assert quantized.codebook == NF4_CODEBOOK
    assert torch.equal(layout.unpack(quantized.tiles).flatten(), unpacked(packed.flatten()))
    scales = layout.unpack_scales(quantized.scales).double() * 2.0**quantized.exponent
    assert torch.allclose(scales.flatten() * 112, state.absmax.double(), rtol=2**-11, atol=0)
    assert nmse(dequantize_4bit(packed, state)[: shape[0], : shape[1]], quantized) < 3e-5


def test_without_bitsandbytes_one_sentence_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(UsageError, match="pip install bitsandbytes, or choose quantizer codebook"):
        quantize(gaussian(1, 32), "nf4")


@pytest.mark.sample(0)
def test_bitsandbytes_is_imported_in_silence() -> None:
    """It would speak of a kernel for multiplications that it could not load. Its logger is left as it was."""
    code = QUIET + "import logging; print(logging.getLogger('bitsandbytes').level)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{logging.NOTSET}\n", "")


@pytest.mark.parametrize(("kind", "largest", "share"), [("nf4", 112, 0.7), ("fp4", 120, 0.35)])
def test_a_table_is_rounded_to_the_whole_numbers_that_fit_it_best(kind: str, largest: int, share: float) -> None:
    """share: of the squared error with a largest entry of 127."""
    table = TABLES[kind].double()
    codebook = table_codebook(table.float())
    assert codebook is not None and max(map(abs, (codebook.entries[c] for c in codebook.codes))) == largest
    values = torch.tensor(codebook.entries)[codebook.codes.int()] * codebook.unit
    plain = (table * 127).round() / 127
    assert (values - table).square().sum() < share * (plain - table).square().sum()


def test_both_zeros_of_fp4_get_one_code() -> None:
    codebook = table_codebook(torch.cat([FP4, -FP4]))
    assert codebook is not None
    assert codebook.entries == (-128, -120, -80, -60, -40, -30, -20, -1, 0, 1, 20, 30, 40, 60, 80, 120)
    assert codebook.codes[0] == codebook.codes[8] == 8
    assert 0 not in codebook.codes  # -128 fills the codebook up and means nothing


def test_values_that_would_round_to_one_make_no_codebook() -> None:
    table = NF4.clone()
    table[8] = 1e-4  # beside a 0
    assert table_codebook(table) is None


@given(st.lists(st.integers(-127, 127), min_size=16, max_size=16).filter(any), st.sampled_from([1.0, 1e-3, 0.37]))
def test_a_table_of_whole_numbers_loses_nothing(numbers: list[int], unit: float) -> None:
    """Whatever its order, with any values twice, and not scaled to its largest one."""
    table = torch.tensor(numbers) * (unit / 127)
    codebook = table_codebook(table)
    assert codebook is not None
    assert len(codebook.entries) == 16 and list(codebook.entries) == sorted(set(codebook.entries))
    assert codebook.entries[0] >= -128 and codebook.entries[15] <= 127
    values = torch.tensor(codebook.entries)[codebook.codes.int()] * codebook.unit
    assert torch.allclose(values, table, rtol=1e-5, atol=0)
