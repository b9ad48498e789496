"""gpt-oss: experts in MXFP4 keep their codes; three types of keys and values; files that can't be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import host_cache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import model_parts
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.model_weights import ModelWeights, as_stored, load_dense
from hetero_ee.weights.store.import_report import ImportedType, imported_types
from hetero_ee.weights.store.manifest import read_manifest
from tests.bitsandbytes_files import edit
from tests.families import edit_config, random_model, save_checkpoint
from tests.packed_files import pack_experts
from tests.quantized_checkpoints import converted, opened, relative_error

PROMPT = [5, 17, 99, 3, 64, 120, 7, 88, 12, 45]  # longer than a window
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
TYPE = "gpt-oss's mxfp4, groups of 32"


def written(folder: Path) -> Any:
    """A random model with experts in MXFP4 in `folder`; the transformers model with the values that the file has."""
    model = random_model("gpt-oss", **SIZES)
    save_checkpoint(model, folder)
    model.load_state_dict(pack_experts(folder), strict=False)
    return model


def reference_logits(spec: ModelSpec, weights: ModelWeights) -> Tensor:
    executor = ReferenceExecutor(spec, weights, len(PROMPT))
    executor.cache.open(0)
    return executor.logits(Batch.of_sequence(0, 0, PROMPT), range(len(PROMPT)))


def report(folder: Path) -> dict[str, ImportedType]:
    return {row.types: row for row in imported_types(read_manifest(folder / "store").source)}


def test_experts_keep_their_codes_and_other_matrices_get_8_bits(tmp_path: Path) -> None:
    model = written(tmp_path)
    dense, stored = load_dense(opened(tmp_path)), converted(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    found = reference_logits(read_spec(tmp_path), dense)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    for name, matrix in stored.matrices.items():
        is_expert = ".moe." in name
        assert matrix.layout == ("int4" if is_expert else "int8"), name
        error = relative_error(matrix.dequantize(), dense.matrices[name].dequantize())
        assert error == 0 if is_expert else 0 < error < 1e-4, name
    assert report(tmp_path)[TYPE].is_exact and report(tmp_path)[TYPE].n_tensors == 6
    assert model_parts(read_spec(tmp_path), "fp16") == model_parts(as_stored(read_spec(tmp_path), stored), "fp16")


@pytest.mark.parametrize("kv_type", ["fp32", "fp16", "int8"])
def test_the_kernels_compute_what_the_reference_does_whatever_the_batch(
    kernels: Path, tmp_path: Path, kv_type: str
) -> None:
    use_kernel_cache(kernels.parent)
    written(tmp_path)
    stored = converted(tmp_path)
    spec = as_stored(read_spec(tmp_path), stored)
    expected = reference_logits(spec, stored)
    found = []
    for sizes, threads in (([10], 1), ([4, 5, 1], 2), ([1] * 10, 2)):
        executor = CpuExecutor(spec, stored, 40, threads, cache=host_cache(spec, 40, kv_type))
        steps, start = [], 0
        for sequence in range(2):  # the second one is decoded beside the first
            executor.cache.open(sequence)
        for size in sizes:
            rows = Batch.of_sequence(0, start, PROMPT[start : start + size])
            other = Batch.of_sequence(1, executor.cache.length(1), PROMPT[:2])
            steps.append(executor.logits(Batch.joined([other, rows]), range(2, 2 + size)))
            start += size
        found.append(torch.cat(steps))
        executor.close()
    assert relative_error(found[0], expected) < (5e-3 if kv_type == "int8" else 2e-3)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_scales_too_far_apart_for_fp16_are_not_called_exact(tmp_path: Path) -> None:
    written(tmp_path)

    def spread(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERTS}_scales"][0, 0, 0] = 60

    edit(tmp_path, spread)
    stored = converted(tmp_path)
    row = report(tmp_path)[TYPE]
    exact = {each.is_exact: each.n_tensors for each in imported_types(read_manifest(tmp_path / "store").source)}
    assert exact[True] == 5 and row.types == TYPE
    name = "layers.1.moe.gate_up"
    assert 0 < relative_error(stored.matrices[name].dequantize(), opened(tmp_path).tensor(name)) < 0.02


def set_to(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{EXPERTS}_scales"), f"{EXPERTS}_scales is missing"),
        (set_to(f"{EXPERTS}_scales", lambda scales: scales.fill_(255)), f"{EXPERTS}_scales gives nan"),
        (set_to(f"{EXPERTS}_blocks", lambda blocks: blocks[1:].clone()), f"{EXPERTS}_blocks has type U8 and shape"),
        (set_to(f"{EXPERTS}_bias", lambda bias: bias[:, 1:].clone()), f"{EXPERTS}_bias is"),
        (
            lambda tensors: tensors.pop("model.layers.0.self_attn.sinks"),
            "lacks tensors: model.layers.0",
        ),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    written(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_dense(opened(tmp_path))


def test_codes_without_their_configuration_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match=f"{EXPERTS.replace('1', '0')}_blocks was packed in MXFP4, config.json"):
        opened(tmp_path)


@pytest.mark.parametrize("changes", [{"swiglu_alpha": 1.5}, {"hidden_act": "gelu"}])
def test_other_activations_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(random_model("gpt-oss"), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=r"expected 1\.702 with silu"):
        read_spec(tmp_path)


def test_missing_fields_mean_what_transformers_says(tmp_path: Path) -> None:
    import transformers

    names = ("rope_parameters", "sliding_window", "swiglu_limit", "layer_types", "head_dim", "num_experts_per_tok")
    save_checkpoint(random_model("gpt-oss"), tmp_path)
    edit_config(tmp_path, **dict.fromkeys(names), num_hidden_layers=3)
    spec, config = read_spec(tmp_path), transformers.GptOssConfig()
    rope = spec.ropes.pop()
    factors, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert torch.allclose(torch.tensor(rope.inverse_frequencies()), factors)
    assert [each.window for each in spec.attentions] == [128, None, 128]
    moe: Any = spec.layer(0).ffn
    assert (moe.activation.threshold, moe.router.n_active, spec.head_dim) == (7.0, 4, 64)
