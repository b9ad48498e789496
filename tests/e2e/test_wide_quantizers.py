"""Conversions to 5, 6 and 8 bits: what a plan counts is what the store has, and more bits come nearer to the floats."""

from pathlib import Path

import pytest

from hetero_ee.config.settings import demo_model_folder
from hetero_ee.engine import Engine
from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import all_tensors, decoder_blocks, in_layout
from hetero_ee.planning.parts import model_parts
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store

DEMO = demo_model_folder()
LAYOUTS = ("int5", "int6", "int8")


def errors(folder: Path, quantizer: str) -> float:
    """The largest relative squared error of the second layer's matrices; checks the bytes that plans count."""
    spec = read_spec(DEMO)
    store = convert(DEMO, spec, folder / quantizer, Quantization.of_model(DEMO, quantizer))
    weights, checkpoint = open_store(store, spec), Checkpoint(DEMO, spec)
    planned = model_parts(in_layout(spec, quantizer), "fp16")
    assert sum(part.weight_bytes for part in planned) == weights.n_bytes
    found = []
    for tensor in all_tensors(decoder_blocks(spec)):
        if tensor.name.startswith("layers.1.") and tensor.name in weights.matrices:
            exact = checkpoint.tensor(tensor.name)
            error = weights.matrices[tensor.name].dequantize() - exact
            found.append(float(error.square().sum() / exact.square().sum()))
    return max(found)


def test_each_bit_divides_the_error_by_four(tmp_path: Path) -> None:
    four, five, six, eight = (errors(tmp_path, name) for name in ("search", *LAYOUTS))
    assert five < four / 3 and six < five / 3 and eight < six / 3


@pytest.mark.parametrize("quantizer", LAYOUTS)
def test_a_text(tmp_path: Path, quantizer: str) -> None:
    convert(DEMO, read_spec(DEMO), tmp_path / "store", Quantization.of_model(DEMO, quantizer))
    with Engine.from_pretrained(tmp_path / "store", threads=1) as engine:
        assert engine.generate("Once upon a time", max_new_tokens=8, temperature=0).text.startswith(", there was")


def test_rows_of_neurons_have_four_bits(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sparse FFNs can't be in int6"):
        Quantization.of_model(DEMO, "int6", neuron_major=True)
