"""GPTQ, AWQ, compressed-tensors, FP8 and 4-bit checkpoints: logits of their values, and what is kept to the bit."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.models.fields import MAX_SIZE
from hetero_ee.models.saved_format import SavedFormat
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.planner import shapes_sha256
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.formats.fp8 import Fp8Matrix
from hetero_ee.weights.formats.saved_matrix import RawTensors
from hetero_ee.weights.model_weights import ModelWeights, as_stored, load_dense
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store import conversion
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.import_report import ImportedType, imported_types
from hetero_ee.weights.store.library import stored_models
from hetero_ee.weights.store.manifest import read_manifest
from hetero_ee.weights.store.reader import open_store
from hetero_ee.weights.weight import TileWeight
from tests.bitsandbytes_files import FILE, edit
from tests.command_line import Cli
from tests.families import edit_config, random_model, save_checkpoint
from tests.packed_files import Format, FourBits, Packing, gptq
from tests.quantized_checkpoints import DOWN, SIZES, converted, in_two_files, opened, relative_error, written

IDS = [5, 17, 99, 3, 64, 120, 7]
BLOCKS = (128, 128)
WITH_ZEROS = "int4 zeros"
# Each: which layouts the layers' matrices get, and whether all of them are kept exactly.
KEPT = {
    "gptq": (Packing(method="gptq"), {"int4"}),
    "gptq-v2": (Packing(method="gptq", version=2, scale_type=torch.bfloat16), {"int4"}),
    "gptq-rows": (Packing(method="gptq", group_size=-1), {"int4"}),
    "gptq-asym": (Packing(method="gptq", symmetric=False), {WITH_ZEROS}),
    "gptq-v2-asym": (Packing(method="gptq", version=2, symmetric=False), {WITH_ZEROS}),
    "awq": (Packing(method="awq", symmetric=False), {WITH_ZEROS}),
    "awq-rows": (Packing(method="awq", symmetric=False, group_size=-1), {WITH_ZEROS}),
    "pack": (Packing(method="pack-quantized", scale_type=torch.bfloat16), {"int4"}),
    "pack-rows": (Packing(method="pack-quantized", group_size=-1), {"int4"}),
    "pack-asym": (Packing(method="pack-quantized", symmetric=False), {WITH_ZEROS}),
    "mxfp4": (Packing(method="mxfp4-pack-quantized"), {"int4"}),
}
ROUNDED = {
    "gptq-reordered": (Packing(method="gptq", reordered=True), {"int8", "int4"}),
    "gptq-reordered-asym": (Packing(method="gptq", reordered=True, symmetric=False), {"int8", WITH_ZEROS}),
    "pack-reordered": (Packing(method="pack-quantized", reordered=True), {"int8", "int4"}),
    "gptq-8": (Packing(method="gptq", bits=8), {"int8"}),
    "pack-8": (Packing(method="pack-quantized", bits=8), {"int8"}),
    "int-8": (Packing(method="int-quantized", bits=8, group_size=-1), {"int8"}),
    "int-8-asym": (Packing(method="int-quantized", bits=8, group_size=-1, symmetric=False), {"int8"}),
    "gptq-8-asym": (Packing(method="gptq", bits=8, symmetric=False, version=2), {"int8"}),
    "fp8-blocks": (Packing(method="fp8", by="fp8", block=BLOCKS, scale_type=torch.float32), {"int8"}),
    "fp8-matrix": (Packing(method="fp8", by="fp8", group_size=-1, scale_type=torch.bfloat16), {"int8"}),
    "fp8-ct-rows": (Packing(method="fp8", by="compressed-tensors", scale_type=torch.bfloat16), {"int8"}),
    "fp8-ct-blocks": (Packing(method="fp8", by="compressed-tensors", block=BLOCKS), {"int8"}),
    "pack-fp32-scales": (Packing(method="pack-quantized", scale_type=torch.float32), {"int4"}),
}
FOUR_BITS = {
    "nf4": (FourBits(), {"int4"}),
    "nf4-nested": (FourBits(nested=True), {"int4"}),
    "fp4-nested-128": (FourBits(kind="fp4", nested=True, block_size=128), {"int4"}),
    "fp4-32": (FourBits(kind="fp4", block_size=32), {"int4"}),
    "nf4-words-4096": (FourBits(storage=torch.bfloat16, block_size=4096), {"int4"}),
}
ALL: dict[str, tuple[Format, set[str]]] = KEPT | ROUNDED | FOUR_BITS


def report(folder: Path) -> list[ImportedType]:
    return imported_types(read_manifest(folder / "store").source)


def reference_logits(spec: Any, weights: ModelWeights) -> Tensor:
    executor = ReferenceExecutor(spec, weights, len(IDS))
    executor.cache.open(0)
    return executor.logits(Batch.of_sequence(0, 0, IDS), range(len(IDS)))


def theirs(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def layouts(weights: ModelWeights) -> set[str]:
    layers = [weight for name, weight in weights.matrices.items() if name.startswith("layers.")]
    return {weight.layout for weight in layers if isinstance(weight, TileWeight)}


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_the_values_in_the_file(tmp_path: Path, name: str) -> None:
    packing, _ = ALL[name]
    model, _ = written(tmp_path, packing)
    checkpoint = opened(tmp_path)
    assert torch.allclose(reference_logits(checkpoint.spec, load_dense(checkpoint)), theirs(model), atol=1e-4)


@pytest.mark.parametrize("name", KEPT)
def test_what_tiles_can_hold_is_kept_to_the_bit(tmp_path: Path, name: str) -> None:
    packing, expected = KEPT[name]
    model, _ = written(tmp_path, packing)
    dense, stored = load_dense(opened(tmp_path)), converted(tmp_path)
    assert layouts(stored) == expected
    for each, matrix in stored.matrices.items():
        if each.startswith("layers."):
            assert torch.equal(matrix.dequantize(), dense.matrices[each].dequantize()), each
    rows = {row.types: row for row in report(tmp_path)}
    assert {row.is_exact for types, row in rows.items() if types != "F32"} == {True}
    spec = as_stored(read_spec(tmp_path), stored)
    stored.matrices.update({each: dense.matrices[each] for each in ("embedding.tokens", "head.tokens")})
    assert torch.allclose(reference_logits(spec, stored), theirs(model), atol=1e-4)


@pytest.mark.parametrize("name", ROUNDED | FOUR_BITS)
def test_what_they_can_not_hold_is_rounded_little(tmp_path: Path, name: str) -> None:
    packing, expected = ALL[name]
    written(tmp_path, packing)
    dense, stored = load_dense(opened(tmp_path)), converted(tmp_path)
    assert layouts(stored) == expected
    assert not isinstance(packing, FourBits) or stored.quantizer == packing.kind
    assert all(torch.equal(vector, dense.vectors[each]) for each, vector in stored.vectors.items())
    for each, matrix in stored.matrices.items():
        assert relative_error(matrix.dequantize(), dense.matrices[each].dequantize()) < 6e-5, each
        if packing.reordered and each.endswith(".ffn.down"):
            assert torch.equal(matrix.dequantize(), dense.matrices[each].dequantize())
    assert not all(row.is_exact for row in report(tmp_path) if row.types != "F32")


@pytest.mark.parametrize("name", ["awq", "gptq-reordered", "fp8-blocks"])
def test_the_kernels_compute_the_same(kernels: Path, tmp_path: Path, name: str) -> None:
    use_kernel_cache(kernels.parent)
    written(tmp_path, ALL[name][0])
    stored = converted(tmp_path)
    spec = as_stored(read_spec(tmp_path), stored)
    executor = CpuExecutor(spec, stored, len(IDS), threads=1)
    executor.cache.open(0)
    found = executor.logits(Batch.of_sequence(0, 0, IDS), range(len(IDS)))
    executor.close()
    expected = reference_logits(spec, stored)
    assert relative_error(found, expected) < 1e-3


@pytest.mark.parametrize("family", ["qwen2", "phi3", "opt", "qwen3", "gemma2", "glm4", "starcoder2"])
@pytest.mark.parametrize("name", ["gptq-reordered", "awq", "nf4-nested"])
def test_families(tmp_path: Path, family: str, name: str) -> None:
    """Stacked and unstacked matrices, biases beside reordered neurons, FFNs without a gate."""
    sizes = {"opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "qwen3": {"head_dim": 32}}
    sizes = sizes.get(family, {"head_dim": 16} if family in ("gemma2", "glm4") else {})
    model, _ = written(tmp_path, ALL[name][0], family, sizes=sizes)
    checkpoint = opened(tmp_path)
    dense, stored = load_dense(checkpoint), converted(tmp_path)
    assert torch.allclose(reference_logits(checkpoint.spec, dense), theirs(model), atol=1e-4)
    assert torch.allclose(reference_logits(as_stored(checkpoint.spec, stored), stored), theirs(model), atol=0.3)


@pytest.mark.parametrize("name", ["gptq-reordered", "awq", "fp8-blocks", "gptq"])
def test_plans_know_the_bytes_from_the_configuration(tmp_path: Path, name: str) -> None:
    written(tmp_path, ALL[name][0])
    planned = model_parts(read_spec(tmp_path), "fp16")
    stored = as_stored(read_spec(tmp_path), converted(tmp_path))
    assert planned == model_parts(stored, "fp16")


def test_plans_are_of_what_a_quantizer_would_make(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path, ALL["fp8-blocks"][0])
    asked = ("plan", tmp_path, "--hardware", "rtx-4060-laptop-8gb", "--json")
    kept, made = (json.loads(cli(*asked, *more).out) for more in ((), ("--quantizer", "codebook")))
    assert kept["shapes_sha256"] == shapes_sha256(read_spec(tmp_path)) != made["shapes_sha256"]
    assert made["shapes_sha256"] == shapes_sha256(read_spec(tmp_path).in_plain_int4)


def test_parts_in_floats_are_quantized_with_the_rest_of_their_matrix(tmp_path: Path) -> None:
    written(tmp_path, ALL["gptq"][0], kept=("k_proj", "o_proj"))
    stored = converted(tmp_path)
    kept = {row.types: row for row in report(tmp_path)}
    both = kept["F32, GPTQ int4, groups of 32"]
    assert not both.is_exact and both.n_tensors == 1 and both.relative_squared_error < 0.01
    assert kept["GPTQ int4, groups of 32"].is_exact
    assert layouts(stored) == {"int4"}


def test_zero_points_of_a_matrix_with_parts_in_floats(tmp_path: Path) -> None:
    """It gets the default quantizer's codes, without zero points."""
    written(tmp_path, ALL["awq"][0], kept=("k_proj",))
    assert layouts(converted(tmp_path)) == {"int4", WITH_ZEROS}


@pytest.mark.parametrize("quantizer", ["search", "codebook", "rtn", "nf4"])
@pytest.mark.parametrize("name", ["gptq", "awq", "gptq-reordered", "fp8-blocks", "fp4-32"])
def test_another_quantizer_starts_from_the_values(tmp_path: Path, name: str, quantizer: str) -> None:
    written(tmp_path, ALL[name][0])
    stored, dense = converted(tmp_path, quantizer), load_dense(opened(tmp_path))
    assert layouts(stored) == {"int4"} and stored.quantizer == quantizer
    for each, matrix in stored.matrices.items():
        assert relative_error(matrix.dequantize(), dense.matrices[each].dequantize()) < 0.02, each


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_head_in_4_bits_is_kept_in_8(tmp_path: Path, symmetric: bool) -> None:
    packing = Packing(method="gptq", symmetric=symmetric)
    written(tmp_path, packing, sizes={"vocab_size": 136})

    def change(tensors: dict[str, Tensor]) -> None:
        saved, _ = gptq(tensors.pop("lm_head.weight"), packing)
        tensors.update({f"lm_head{suffix}": tensor.contiguous() for suffix, tensor in saved.items()})

    edit(tmp_path, change)
    head = converted(tmp_path).matrices["head.tokens"]
    assert isinstance(head, TileWeight) and head.layout == "int8"
    assert torch.equal(head.dequantize(), opened(tmp_path).tensor("head.tokens"))


def test_old_gptq_has_its_configuration_in_a_file_beside(tmp_path: Path) -> None:
    _, values = written(tmp_path, ALL["gptq"][0])
    config = json.loads((tmp_path / "config.json").read_text())
    beside = config["quantization_config"]
    del beside["quant_method"]
    edit_config(tmp_path, quantization_config=None)
    (tmp_path / "quantize_config.json").write_text(json.dumps(beside))
    down = opened(tmp_path).tensor("layers.0.ffn.down")
    assert torch.equal(down, values["model.layers.0.mlp.down_proj.weight"])
    assert layouts(converted(tmp_path)) == {"int4"}


def test_old_gptq_with_a_file_of_another_name_is_told_which_one_to_take(tmp_path: Path) -> None:
    written(tmp_path, ALL["gptq"][0])
    (tmp_path / FILE).rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    with pytest.raises(CheckpointError, match=f"rename gptq_model-4bit-32g.safetensors to {FILE} if"):
        opened(tmp_path)


def test_blocks_that_are_said_to_be_larger_than_the_matrix_take_no_memory() -> None:
    codes, scales = torch.ones(4, 4096).to(torch.float8_e4m3fn), torch.arange(4096.0)[None]
    tensors = {"x.weight": codes, "x.weight_scale_inv": scales}
    kinds = {"x.weight": "F8_E4M3", "x.weight_scale_inv": "F32"}
    raw = RawTensors(
        Path(), tensors.keys(), lambda name: (kinds[name], tuple(tensors[name].shape)), tensors.__getitem__
    )
    said = SavedFormat("fp8", "e4m3", group_size=1, block_rows=MAX_SIZE)
    assert torch.equal(Fp8Matrix("x", (4, 4096), said, raw).dequantize(), scales.expand(4, -1))
    tensors["x.weight_scale_inv"] = scales[:, 7:8]
    said = SavedFormat("fp8", "e4m3", group_size=MAX_SIZE, block_rows=MAX_SIZE)
    assert torch.equal(Fp8Matrix("x", (4, 4096), said, raw).dequantize(), torch.full((4, 4096), 7.0))


def test_static_groups_lie_in_order(tmp_path: Path) -> None:
    """desc_act then says how they were found alone."""
    written(tmp_path, ALL["gptq"][0])
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    for static in ({"static_groups": True}, {"meta": {"static_groups": True}}):
        edit_config(tmp_path, quantization_config=config | {"desc_act": True} | static)
        assert read_spec(tmp_path).matrix_layouts == ()
    assert layouts(converted(tmp_path)) == {"int4"}


def test_scales_of_activations_are_passed_over(tmp_path: Path) -> None:
    written(tmp_path, ALL["fp8-matrix"][0])

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())

    edit(tmp_path, change)
    assert layouts(converted(tmp_path)) == {"int8"}


def test_biases_of_zeros_that_old_packers_added(tmp_path: Path) -> None:
    written(tmp_path, ALL["gptq"][0])
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.down_proj.bias": torch.zeros(64)}))
    assert layouts(converted(tmp_path)) == {"int4"}


@pytest.mark.parametrize(
    ("name", "parts"), [("awq", (".qweight", ".qzeros")), ("nf4-nested", (".weight", ".weight.absmax"))]
)
def test_a_matrix_and_its_scales_may_lie_in_different_files(tmp_path: Path, name: str, parts: tuple[str, str]) -> None:
    _, values = written(tmp_path, ALL[name][0])
    files = in_two_files(tmp_path)
    assert files[DOWN + parts[0]] != files[DOWN + parts[1]]
    assert torch.equal(opened(tmp_path).tensor("layers.0.ffn.down"), values[f"{DOWN}.weight"])


def test_sparse_layers_are_made_from_the_values(tmp_path: Path) -> None:
    written(tmp_path, ALL["gptq-reordered"][0])
    spec = read_spec(tmp_path)
    store = convert(tmp_path, spec, tmp_path / "store", Quantization.of_model(tmp_path, None, neuron_major=True))
    stored, down = open_store(store, spec), opened(tmp_path).tensor("layers.0.ffn.down")
    assert relative_error(stored.matrices["layers.0.ffn.down"].dequantize().T, down) < 0.02


@pytest.mark.parametrize(
    ("name", "quantizer", "is_said"),
    [(None, None, True), ("gptq", "rtn", True), ("fp8-blocks", "rtn", True), ("gptq", None, False)],
)
def test_that_most_weights_lose_bits_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, quantizer: str | None, is_said: bool
) -> None:
    if name is None:
        save_checkpoint(random_model("llama", **SIZES), tmp_path)
    else:
        written(tmp_path, ALL[name][0])
    said, quantization = list[str](), Quantization.of_model(tmp_path, quantizer)
    for least, folder in ((conversion.NOTICED_WEIGHTS, "toy"), (0, "store"), (0, "store")):
        monkeypatch.setattr(conversion, "NOTICED_WEIGHTS", least)
        convert(
            tmp_path, read_spec(tmp_path), tmp_path / folder, quantization, progress=lambda *told: said.append(told[0])
        )
    expected = conversion.FOUR_BITS + ("" if name else conversion.OWN_CODES_KEPT)  # untrue of codes that are replaced
    assert said.count(expected) == is_said and "KL divergence 0.15 to 0.22" in conversion.FOUR_BITS
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        convert(tmp_path, read_spec(tmp_path), tmp_path / "without a listener", quantization)
    assert any("KL divergence 0.15 to 0.22" in str(each.message) for each in warned) == is_said


def test_stores_say_where_they_come_from_and_what_was_exact(tmp_path: Path) -> None:
    for name in ("gptq", "fp8-blocks"):
        folder = tmp_path / name
        written(folder, ALL[name][0])
        spec = read_spec(folder)
        (tmp_path / "stores").mkdir(exist_ok=True)
        convert(folder, spec, tmp_path / "stores" / name, Quantization.of_model(folder, None))
    fp8, kept = stored_models(tmp_path)
    assert (kept.source_format, kept.quantizer, fp8.quantizer) == ("GPTQ int4, groups of 32", "gptq", "fp8")
    assert (fp8.source_format, fp8.exact_share) == ("FP8 e4m3, blocks of 128 x 128", 0)
    assert kept.relative_squared_error is not None and fp8.relative_squared_error is not None
    assert 0 < kept.relative_squared_error < fp8.relative_squared_error < 1e-4
    assert kept.exact_share is not None and 0.5 < kept.exact_share < 1  # all but embedding and head
