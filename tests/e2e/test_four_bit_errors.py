"""Malformed 4-bit checkpoints, and weights quantized in other ways: each is refused in one sentence."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.config_file import read_spec
from tests.bitsandbytes_files import edit, edit_state, quantization_config, state_tensor
from tests.families import edit_config, random_model, save_checkpoint
from tests.packed_files import FourBits, pack_checkpoint
from tests.quantized_checkpoints import DOWN, SIZES, Change, removed, replaced, with_value
from tests.quantized_checkpoints import refusal as any_refusal

MATRIX = f"{DOWN}.weight"
STATE = f"{MATRIX}.quant_state.bitsandbytes__nf4"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good checkpoint without double quantization, and one with it."""
    model = random_model("llama", **SIZES)
    folders = {name: save_checkpoint(model, tmp_path_factory.mktemp(name)) for name in ("plain", "nested")}
    for name, folder in folders.items():
        pack_checkpoint(folder, FourBits(nested=name == "nested"))
    return folders


@pytest.fixture
def plain(wholes: dict[str, Path], tmp_path: Path) -> Path:
    """The first to spoil."""
    return Path(shutil.copytree(wholes["plain"], tmp_path / "plain"))


@pytest.fixture
def nested(wholes: dict[str, Path], tmp_path: Path) -> Path:
    """The second to spoil."""
    return Path(shutil.copytree(wholes["nested"], tmp_path / "nested"))


@pytest.fixture(params=["plain", "nested"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Both alternately."""
    spoilt: Path = request.getfixturevalue(request.param)
    return spoilt


refusal = partial(any_refusal, error=CheckpointError)


TENSORS: dict[str, tuple[Change, str]] = {
    "no codes": (removed(".weight"), f"{MATRIX} is missing"),
    "no absmax": (removed(".weight.absmax"), f"{MATRIX}.absmax is missing"),
    "no table": (removed(".weight.quant_map"), f"{MATRIX}.quant_map is missing"),
    "no state": (removed(".weight.quant_state.bitsandbytes__nf4"), "has 0 tensors"),
    "two states": (lambda t: t.update({STATE.replace("nf4", "fp4"): t[STATE].clone()}), "has 2 tensors"),
    "a state of another type": (lambda t: t.update({STATE.replace("nf4", "fp4"): t.pop(STATE)}), "quant_type is 'nf4'"),
    "half a nested state": (
        lambda t: t.update({f"{MATRIX}.nested_absmax": torch.ones(1)}) or t.pop(f"{MATRIX}.nested_quant_map", None),
        "nested_quant_map is missing",
    ),
    "codes cut short": (replaced(".weight", lambda codes: codes[:-1].clone()), "shape [3071, 1], expected 3072 bytes"),
    "codes too many": (replaced(".weight", lambda codes: codes.repeat(2, 1)), "expected 3072 bytes"),
    "codes not packed": (
        replaced(".weight", lambda codes: torch.zeros(64, 96, dtype=torch.uint8)),
        "expected 3072 bytes",
    ),
    "codes of 64 bits": (replaced(".weight", lambda codes: codes.flatten().view(torch.int64)), "type I64"),
    "codes that are floats": (replaced(".weight", lambda codes: codes.float()), "type F32"),
    "absmax cut short": (replaced(".weight.absmax", lambda absmax: absmax[:-1].clone()), "shape [95]"),
    "absmax too long": (replaced(".weight.absmax", lambda absmax: torch.cat([absmax, absmax])), "shape [192]"),
    "absmax in a column": (replaced(".weight.absmax", lambda absmax: absmax.view(-1, 1).clone()), "shape [96, 1]"),
    "absmax in fp16": (replaced(".weight.absmax", lambda absmax: absmax.half()), "type F16"),
    "a table of 15": (replaced(".weight.quant_map", lambda table: table[:15].clone()), "expected F32 and [16]"),
    "a table of 256": (replaced(".weight.quant_map", lambda table: table.repeat(16)), "expected F32 and [16]"),
    "a table in fp16": (replaced(".weight.quant_map", lambda table: table.half()), "expected F32 and [16]"),
    "a table with a NaN": (with_value(".weight.quant_map", NAN, 3), "is not a table of values from -1 to 1"),
    "a table with an infinity": (with_value(".weight.quant_map", INF, 3), "is not a table of values from -1 to 1"),
    "a table beyond 1": (with_value(".weight.quant_map", 1.5, 3), "is not a table of values from -1 to 1"),
    "a table of zeros": (replaced(".weight.quant_map", torch.zeros_like), "is not a table of values from -1 to 1"),
    "a state of floats": (replaced(STATE.removeprefix(DOWN), lambda state: state.float()), "can't be used"),
    "a state of megabytes": (lambda t: t.update({STATE: torch.zeros(2**20, dtype=torch.uint8)}), "at most 4096 bytes"),
    "an empty state": (lambda t: t.update({STATE: state_tensor(b"")}), "can't be used"),
    "a state that is no JSON": (lambda t: t.update({STATE: state_tensor(b"{'quant_type'")}), "can't be used"),
    "a state that is no UTF-8": (lambda t: t.update({STATE: state_tensor(b'{"\xff": 1}')}), "can't be used"),
    "a state that is deep": (lambda t: t.update({STATE: state_tensor(b"[" * 4000)}), "can't be used"),
    "a state that is a list": (lambda t: t.update({STATE: state_tensor([1])}), "expected `object`"),
    "terminal commands": (lambda t: t.update({STATE: state_tensor({"\x1b[2J": 1})}), "can't be used"),
    "a surplus tensor": (lambda t: t.update({f"{MATRIX}.SCB": torch.ones(64)}), "LlamaForCausalLM does not have"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_named(folder: Path, name: str) -> None:
    change, words = TENSORS[name]
    edit(folder, change)
    sentence = refusal(folder)
    assert words in sentence and MATRIX in sentence


FIELDS: list[tuple[str, Any, str]] = [
    ("quant_type", "fp4", "quant_type is 'fp4', expected nf4"),
    ("quant_type", ["nf4"], "quant_type: expected `str`, got `array`"),
    ("blocksize", 63, "blocksize is 63, expected 32 or 64"),
    ("blocksize", 16, "blocksize is 16"),
    ("blocksize", 8192, "blocksize is 8192"),
    ("blocksize", 0, "blocksize is 0"),
    ("blocksize", -64, "blocksize is -64"),
    ("blocksize", 64.0, "blocksize: expected `int`, got `float`"),
    ("blocksize", True, "blocksize: expected `int`, got `bool`"),
    ("blocksize", "64", "blocksize: expected `int`, got `str`"),
    ("blocksize", 32, "expected"),  # allowed, but absmax has another length
    ("blocksize", None, "blocksize is missing"),
    ("dtype", "complex64", "dtype is 'complex64'"),
    ("shape", [96, 64], "shape is (96, 64), expected (64, 96)"),
    ("shape", [64, 96, 1], "expected (64, 96)"),
    ("shape", [2**40, 2**40], "expected (64, 96)"),
    ("shape", 6144, "shape: expected `array`, got `int`"),
    ("shape", None, "shape is missing"),
    ("surprise", 1, "surprise is unknown"),
]


@pytest.mark.parametrize(("field", "value", "words"), FIELDS)
def test_fields_that_do_not_fit_are_named(folder: Path, field: str, value: Any, words: str) -> None:
    edit_state(folder, MATRIX, **{field: value})
    sentence = refusal(folder)
    assert words in sentence and MATRIX in sentence


NESTED: list[tuple[str, Any, str]] = [
    ("nested_blocksize", 100, "nested_blocksize is 100"),
    ("nested_blocksize", 32, "expected F32 and [3]"),
    ("nested_blocksize", None, "nested_blocksize is missing"),
    ("nested_dtype", "float16", "nested_dtype is 'float16', expected float32"),
    ("nested_offset", NAN, "NaN is not a number"),
    ("nested_offset", INF, "Infinity is not a number"),
    ("nested_offset", 10**400, "nested_offset: number out of range"),
    ("nested_offset", "0.1", "nested_offset: expected `float`, got `str`"),
    ("nested_offset", False, "nested_offset: expected `float`, got `bool`"),
    ("nested_offset", None, "nested_offset is missing"),
]


@pytest.mark.parametrize(("field", "value", "words"), NESTED)
def test_fields_of_double_quantization_are_named(nested: Path, field: str, value: Any, words: str) -> None:
    edit_state(nested, MATRIX, **{field: value})
    sentence = refusal(nested)
    assert words in sentence and MATRIX in sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_value(".weight.nested_absmax", NAN, 0), "nested_absmax gives nan at [0]"),
        (with_value(".weight.nested_absmax", -INF, 0), "nested_absmax gives -inf at [0]"),
        (with_value(".weight.nested_quant_map", NAN, 3), "nested_quant_map is not a table"),
        (replaced(".weight.nested_quant_map", lambda table: table[:128].clone()), "expected F32 and [256]"),
        (replaced(".weight.nested_absmax", lambda scales: scales.repeat(2)), "expected F32 and [1]"),
        (removed(".weight.nested_absmax"), "nested_absmax is missing"),
        (
            lambda t: [removed(f".weight{s}")(t) for s in (".nested_absmax", ".nested_quant_map")],
            "nested_blocksize is unknown",
        ),
    ],
)
def test_tensors_of_double_quantization_are_named(nested: Path, change: Change, words: str) -> None:
    edit(nested, change)
    assert words in refusal(nested)


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_an_absmax_that_is_no_number_is_named_with_its_place(plain: Path, value: float) -> None:
    edit(plain, with_value(".weight.absmax", value, 7))
    assert f"{MATRIX}.absmax gives {value} at [7]" in refusal(plain)


def test_a_configuration_of_other_weights_is_refused(folder: Path) -> None:
    for config, words in ((None, "not quantized (no quantization_config)"), (quantization_config("fp4"), "says fp4")):
        edit_config(folder, quantization_config=config)
        sentence = refusal(folder)
        assert "quantized to nf4" in sentence and words in sentence


def test_a_configuration_that_promises_4_bits_of_floats_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(random_model("llama", num_hidden_layers=1), tmp_path / "model")
    edit_config(folder, quantization_config=quantization_config("nf4"))
    assert "says that the weights are in bitsandbytes nf4, and they are not" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quantization by 'hqq' is not supported"),
        ({"quant_method": "\x1b[2J"}, "quantization by '\\x1b[2J' is not supported"),
        ({"quant_method": ["bitsandbytes"]}, "expected a string"),
        ({}, "quantization by 'unknown' is not supported"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes with load_in_8bit is not supported"),
        ({"load_in_8bit": True}, "bitsandbytes with load_in_8bit is not supported"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": 1}, "load_in_4bit is 1, expected true or false"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4', expected nf4 or fp4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": 4}, "expected a string"),
        ("nf4", "expected an object"),
        (False, "expected an object"),
    ],
)
def test_weights_quantized_otherwise_are_refused_by_name(folder: Path, config: Any, words: str) -> None:
    edit_config(folder, quantization_config=config)
    with pytest.raises(ModelError) as caught:
        read_spec(folder)
    sentence = str(caught.value)
    assert words in sentence and "quantization_config" in sentence and sentence.isprintable()


def test_bitsandbytes_own_default_type_is_fp4(folder: Path) -> None:
    edit_config(folder, quantization_config={"load_in_4bit": True})
    assert "config.json says fp4" in refusal(folder)
