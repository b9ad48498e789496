"""Malformed GPTQ, AWQ, compressed-tensors and FP8 checkpoints: each is refused in one sentence, and nothing is left."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bitsandbytes_files import FILE, edit
from tests.families import edit_config, random_model, save_checkpoint
from tests.packed_files import Packing, pack_checkpoint
from tests.quantized_checkpoints import DOWN, SIZES, Change, refusal, removed, replaced, with_value

PACKINGS = {
    "gptq": Packing(method="gptq"),
    "asym": Packing(method="gptq", symmetric=False),
    "reordered": Packing(method="gptq", reordered=True),
    "awq": Packing(method="awq", symmetric=False),
    "pack": Packing(method="pack-quantized", symmetric=False),
    "packed-order": Packing(method="pack-quantized", reordered=True),
    "int8": Packing(method="int-quantized", bits=8, group_size=-1),
    "mxfp4": Packing(method="mxfp4-pack-quantized"),
    "fp8": Packing(method="fp8", by="fp8", block=(32, 32), scale_type=torch.float32),
    "fp8-matrix": Packing(method="fp8", by="compressed-tensors", group_size=-1),
}
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good checkpoint in each format."""
    model, folders = random_model("llama", **SIZES), {}
    for name, packing in PACKINGS.items():
        folders[name] = save_checkpoint(model, tmp_path_factory.mktemp(name))
        pack_checkpoint(folders[name], packing)
    return folders


def cut(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


def doubled(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


def turned(tensor: Tensor) -> Tensor:
    return tensor.T.contiguous()


TENSORS: list[tuple[str, str, Change, str]] = [
    *(
        (kind, f"{suffix} {name}", change(suffix), f"{DOWN}{suffix}")
        for kind, suffixes in {
            "gptq": (".qweight", ".qzeros", ".scales", ".g_idx"),
            "awq": (".qweight", ".qzeros", ".scales"),
            "pack": (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape"),
            "packed-order": (".weight_g_idx",),
            "int8": (".weight_scale",),
            "mxfp4": (".weight_packed", ".weight_scale"),
            "fp8": (".weight", ".weight_scale_inv"),
        }.items()
        for suffix in suffixes
        for name, change in {
            "cut short": lambda suffix: replaced(suffix, cut),
            "too long": lambda suffix: replaced(suffix, doubled),
            "of another type": lambda suffix: replaced(suffix, lambda tensor: tensor.double()),
        }.items()
    ),
    *(
        (kind, f"no {suffix}", removed(suffix), DOWN)
        for kind, suffixes in {
            "gptq": (".qweight", ".qzeros", ".scales"),
            "reordered": (".g_idx",),
            "awq": (".qweight", ".qzeros", ".scales"),
            "pack": (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape"),
            "packed-order": (".weight_g_idx",),
            "int8": (".weight", ".weight_scale"),
            "mxfp4": (".weight_packed", ".weight_scale"),
            "fp8": (".weight", ".weight_scale_inv"),
            "fp8-matrix": (".weight_scale",),
        }.items()
        for suffix in suffixes
    ),
    *(
        (kind, f"{suffix} {value}", with_value(suffix, value, *index), f"{DOWN}{suffix} gives {value} at")
        for kind, suffix, *index in (
            ("gptq", ".scales", 1, 5),
            ("awq", ".scales", 2, 63),
            ("pack", ".weight_scale", 0, 2),
            ("int8", ".weight_scale", 63, 0),
            ("fp8", ".weight_scale_inv", 1, 1),
            ("fp8-matrix", ".weight_scale", 0),
        )
        for value in (NAN, INF, -INF)
    ),
    ("fp8", "a code that is no number", with_value(".weight", NAN, 3, 9), "gives nan at [3, 9]"),
    ("mxfp4", "an exponent that is no number", with_value(".weight_scale", 255, 4, 1), "gives nan at [4, 1]"),
    ("gptq", "codes turned", replaced(".qweight", turned), "expected I32 and [12, 64]"),
    ("awq", "codes turned", replaced(".qweight", turned), "expected I32 and [96, 8]"),
    ("pack", "codes turned", replaced(".weight_packed", turned), "expected I32 and [64, 12]"),
    ("gptq", "zero points that are others", with_value(".qzeros", 0x77777776, 0, 0), "has zero point 7, and config"),
    ("asym", "a zero point that overflowed", with_value(".qzeros", -1, 0, 0), "has zero point 16, which overflowed"),
    (
        "gptq",
        "groups of another order",
        with_value(".g_idx", 2, 0),
        "another order than config.json says (desc_act, static_groups)",
    ),
    ("gptq", "a group too many", with_value(".g_idx", 3, 7), "has group 3 at [7], expected 0 to 2"),
    ("reordered", "a group too many", with_value(".g_idx", 3, 7), "has group 3 at [7], expected 0 to 2"),
    ("reordered", "a group below", with_value(".g_idx", -1, 95), "has group -1 at [95], expected 0 to 2"),
    ("packed-order", "groups never set", replaced(".weight_g_idx", lambda t: t * 0 - 1), "has group -1 at [0]"),
    ("packed-order", "a huge group", with_value(".weight_g_idx", 2**31 - 1, 1), "has group 2147483647 at [1]"),
    ("pack", "another shape", with_value(".weight_shape", 65, 0), "is [65, 96], expected [64, 96]"),
    ("pack", "a huge shape", with_value(".weight_shape", 2**62, 1), "expected [64, 96]"),
    ("gptq", "a surplus tensor", lambda t: t.update({f"{DOWN}.g_idx2": torch.ones(96)}), "does not have"),
    ("gptq", "a bias of other values", lambda t: t.update({f"{DOWN}.bias": torch.ones(64)}), "does not have"),
    ("gptq", "floats beside", lambda t: t.update({f"{DOWN}.weight": torch.ones(64, 96)}), "does not have"),
    ("pack", "floats beside", lambda t: t.update({f"{DOWN}.weight": torch.ones(64, 96)}), "does not have"),
    ("fp8", "both scales", lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(2, 3)}), "does not have"),
    ("fp8", "e5m2", replaced(".weight", lambda t: t.float().to(torch.float8_e5m2)), "F8_E5M2"),
]


@pytest.mark.parametrize(("kind", "name", "change", "words"), TENSORS, ids=[f"{k} {n}" for k, n, _, _ in TENSORS])
def test_tensors_that_do_not_fit_are_named(
    wholes: dict[str, Path], tmp_path: Path, kind: str, name: str, change: Change, words: str
) -> None:
    folder = Path(shutil.copytree(wholes[kind], tmp_path / "model"))
    edit(folder, change)
    sentence = refusal(folder)
    assert words in sentence, sentence


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 2}, "GPTQ in 2 bits is not supported; give a copy in 4 or 8 bits"),
    ("gptq", {"bits": 3}, "GPTQ in 3 bits is not supported"),
    ("gptq", {"bits": 8}, "expected I32 and [16, 64]"),
    ("gptq", {"bits": None}, "bits is missing"),
    ("gptq", {"bits": "4"}, "bits is '4'"),
    ("gptq", {"bits": True}, "bits is True"),
    ("gptq", {"bits": 2**70}, "bits is 1180591620717411303424"),
    ("gptq", {"group_size": 16}, "group_size is 16, expected -1 or a multiple of 32"),
    ("gptq", {"group_size": 0}, "group_size is 0"),
    ("gptq", {"group_size": -2}, "group_size is -2"),
    ("gptq", {"group_size": 33}, "group_size is 33"),
    ("gptq", {"group_size": 2**40}, "group_size is 1099511627776"),
    ("gptq", {"group_size": 64}, "expected F32 or F16 or BF16 and [1, 64]"),
    ("gptq", {"group_size": -1}, "expected F32 or F16 or BF16 and [1, 64]"),
    ("gptq", {"sym": "yes"}, "sym is 'yes', expected true or false"),
    ("gptq", {"desc_act": 1}, "desc_act is 1, expected true or false"),
    ("gptq", {"checkpoint_format": "gptq_v2"}, "has zero point 7, and config.json says 8 of all (sym)"),
    (
        "gptq",
        {"checkpoint_format": "marlin"},
        "GPTQ packed as 'marlin' is not supported; give a copy in checkpoint_form",
    ),
    ("gptq", {"checkpoint_format": "exllama"}, "GPTQ packed as 'exllama' is not supported"),
    ("gptq", {"checkpoint_format": "bitblas"}, "GPTQ packed as 'bitblas' is not supported"),
    ("gptq", {"is_marlin_format": True}, "GPTQ packed as 'marlin' is not supported"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype is 'int16', expected int32"),
    ("gptq", {"dynamic": {r".*\.down_proj": {"bits": 8}}}, "other bits for"),
    ("gptq", {"meta": "v2"}, "meta is 'v2', expected an object"),
    ("gptq", {"quant_method": "awq"}, "AWQ packed as 'gptq' is not supported"),
    ("gptq", {"quant_method": "awq", "version": "gemm"}, "q_proj.qweight has type I32 and shape [8, 64], expected"),
    ("gptq", {"quant_method": "compressed-tensors"}, "compressed-tensors in format 'none named' is not supported"),
    ("gptq", {"quant_method": "fp8"}, "was packed by GPTQ or AWQ, config.json says FP8 e4m3"),
    ("gptq", {"quant_method": "\x1b[2J"}, "quantization by '\\x1b[2J' is not supported"),
    ("gptq", {"modules_to_not_convert": [DOWN]}, "config.json says that it is not"),
    ("gptq", {"modules_to_not_convert": "lm_head"}, "expected a list of modules"),
    ("gptq", {"modules_to_not_convert": [["lm_head"]]}, "expected a list of modules"),
    ("awq", {"bits": 3}, "AWQ in 3 bits is not supported"),
    ("awq", {"bits": 8}, "AWQ in 8 bits is not supported; give a copy in 4 bits"),
    ("awq", {"version": "gemv"}, "AWQ packed as 'gemv' is not supported; give a copy in version gemm"),
    ("awq", {"version": "gemv_fast"}, "AWQ packed as 'gemv_fast'"),
    ("awq", {"version": "marlin"}, "AWQ packed as 'marlin'"),
    ("awq", {"version": 2}, "version is 2, expected a string"),
    ("awq", {"zero_point": False}, "AWQ without zero_point is not supported"),
    ("awq", {"group_size": 48}, "group_size is 48"),
    ("awq", {"group_size": 64}, "qzeros has type I32"),
    ("awq", {"quant_method": "gptq", "sym": False}, "expected I32 and"),
    ("pack", {"format": "marlin-24"}, "compressed-tensors in format 'marlin-24' is not supported"),
    ("pack", {"format": "nvfp4-pack-quantized"}, "compressed-tensors in format 'nvfp4-pack-quantized' is not"),
    ("pack", {"format": "mixed-precision"}, "compressed-tensors in format 'mixed-precision' is not supported"),
    ("pack", {"format": 4}, "format is 4, expected a string"),
    ("pack", {"format": "float-quantized"}, "with 4 bits of type 'int' is not supported"),
    ("pack", {"quantization_status": "initialized"}, "quantization_status is 'initialized'"),
    ("pack", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity 'sparse-24-bitmask'"),
    ("pack", {"transform_config": {"config_groups": {"R1": {}}}}, "with transform_config is not supported"),
    ("pack", {"config_groups": {}}, "config_groups is empty"),
    ("pack", {"config_groups": []}, "config_groups is [], expected an object"),
    ("pack", {"config_groups": {"group_0": 4}}, "group_0 is 4, expected an object"),
    ("pack", {"config_groups": {"group_0": {"weights": None}}}, "expected I32 and [64, 16]"),
    ("pack", {"ignore": {"lm_head": 1}}, "expected a list of modules"),
    ("pack", {"ignore": [DOWN]}, "config.json says that it is not"),
    ("fp8", {"weight_block_size": [128]}, "weight_block_size is [128], expected two sizes"),
    ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
    ("fp8", {"weight_block_size": [-128, 128]}, "weight_block_size is [-128, 128]"),
    ("fp8", {"weight_block_size": [128.0, 128]}, "weight_block_size is [128.0, 128]"),
    ("fp8", {"weight_block_size": [2**60, 128]}, "weight_block_size is [1152921504606846976, 128]"),
    ("fp8", {"weight_block_size": "128x128"}, "weight_block_size is '128x128'"),
    ("fp8", {"weight_block_size": [128, 128]}, "expected F32 or F16 or BF16 and [1, 1]"),
    ("fp8", {"weight_block_size": None}, "weight_scale_inv has type F32 and shape [2, 2]"),
    ("fp8", {"scale_fmt": "e5m2"}, "scale_fmt is 'e5m2'"),
]
WEIGHTS: list[tuple[str, dict[str, Any], str]] = [
    ("pack", {"num_bits": 2}, "with 2 bits of type 'int' is not supported; give a copy in int4 or int8"),
    ("pack", {"num_bits": 3}, "with 3 bits of type 'int' is not supported"),
    ("pack", {"num_bits": 8}, "expected I32 and [64, 16]"),
    ("pack", {"type": "float"}, "with 4 bits of type 'float' is not supported"),
    ("pack", {"group_size": 24}, "group_size is 24"),
    ("pack", {"group_size": "32"}, "group_size is '32'"),
    ("pack", {"strategy": "token"}, "strategy 'token' is not supported for int4"),
    ("pack", {"strategy": "block"}, "strategy 'block' is not supported for int4"),
    ("pack", {"symmetric": True}, "weight_zero_point"),
    ("pack", {"symmetric": None}, "weight_zero_point"),
    ("pack", {"symmetric": "no"}, "symmetric is 'no'"),
    ("pack", {"actorder": "random"}, "actorder is 'random', expected group or weight"),
    ("pack", {"actorder": "group"}, "weight_g_idx is missing"),
    ("packed-order", {"actorder": None}, "weight_g_idx"),
    ("mxfp4", {"group_size": 64}, "group_size is 64, expected 32 of mxfp4"),
    ("mxfp4", {"symmetric": False}, "mxfp4 with zero points is not supported"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), CONFIGS, ids=[f"{k} {c}"[:60] for k, c, _ in CONFIGS])
def test_configurations_that_do_not_fit_are_named(
    wholes: dict[str, Path], tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    folder = Path(shutil.copytree(wholes[kind], tmp_path / "model"))
    said = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
    edit_config(folder, quantization_config=said)
    sentence = refusal(folder)
    assert words in sentence, sentence


@pytest.mark.parametrize(("kind", "changes", "words"), WEIGHTS, ids=[f"{k} {c}" for k, c, _ in WEIGHTS])
def test_groups_of_modules_that_do_not_fit_are_named(
    wholes: dict[str, Path], tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    folder = Path(shutil.copytree(wholes[kind], tmp_path / "model"))
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    said["config_groups"]["group_0"]["weights"] |= changes
    edit_config(folder, quantization_config=said)
    sentence = refusal(folder)
    assert words in sentence, sentence


def test_groups_of_modules_in_different_bits(wholes: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(wholes["pack"], tmp_path / "model"))
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    first = said["config_groups"]["group_0"]
    said["config_groups"]["group_1"] = first | {"weights": first["weights"] | {"num_bits": 8}}
    edit_config(folder, quantization_config=said)
    assert "with different groups of modules is not supported" in refusal(folder)


@pytest.mark.parametrize("kind", ["gptq", "awq", "pack", "mxfp4", "int8", "fp8"])
def test_packed_weights_of_which_the_configuration_says_nothing(
    wholes: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    folder = Path(shutil.copytree(wholes[kind], tmp_path / "model"))
    edit_config(folder, quantization_config=None)
    assert "not quantized (no quantization_config)" in refusal(folder)


@pytest.mark.parametrize("kind", PACKINGS)
def test_floats_of_which_the_configuration_says_otherwise(wholes: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder = save_checkpoint(random_model("llama", **SIZES), tmp_path / "model")
    said = json.loads((wholes[kind] / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config=said)
    assert "and they are not" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "4", '{"bits": NaN}', '{"bits": 3}', "{'bits': 4}", "\x00"])
def test_a_file_beside_that_is_none(wholes: dict[str, Path], tmp_path: Path, text: str) -> None:
    folder = Path(shutil.copytree(wholes["gptq"], tmp_path / "model"))
    edit_config(folder, quantization_config=None)
    (folder / "quantize_config.json").write_text(text)
    assert "quantize_config" in refusal(folder) or text.endswith("}")


@pytest.mark.parametrize("n_bytes", [0, 7, 100, 20_000])
@pytest.mark.parametrize("kind", ["gptq", "awq", "pack", "fp8"])
def test_files_that_end_early(wholes: dict[str, Path], tmp_path: Path, kind: str, n_bytes: int) -> None:
    folder = Path(shutil.copytree(wholes[kind], tmp_path / "model"))
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[:n_bytes])
    assert FILE in refusal(folder)
