"""Configurations: every family in every spelling, transformers' own defaults, a named refusal of everything else."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from hetero_ee.errors import ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.layers.rope import RopeScaling, RopeSpec
from hetero_ee.models.spec import ModelSpec
from tests.families import FAMILIES, config_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 30,  # Qwen's windows begin at layer 28
    "num_attention_heads": 32,  # Mistral's and Qwen's default key heads divide it
    "vocab_size": 100,
}
OPT: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "intermediate_size"} | {
    "architectures": ["OPTForCausalLM"],
    "ffn_dim": 96,
}
PREFIXES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "OPT", "Gemma", "Gemma2", "Gemma3", "Olmo2", "Olmo3"]
PREFIXES += ["SmolLM3", "Granite", "Starcoder2", "StableLm", "Glm", "Glm4", "SeedOss", "Helium", "Ernie4_5", "Exaone4"]
FITTING: dict[str, dict[str, int]] = {  # sizes that the other fields' defaults allow
    "Helium": {"num_attention_heads": 20, "hidden_size": 2560},
    "StableLm": {"hidden_size": 256},
}


def required(prefix: str) -> dict[str, Any]:
    needed = (OPT if prefix == "OPT" else LLAMA) | {"architectures": [f"{prefix}ForCausalLM"]}
    return needed | FITTING.get(prefix, {})


def config_class(prefix: str) -> Any:
    return getattr(transformers, "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config")


def refusal(config: Any) -> str:
    """The one-line ModelError that reading `config` must end in."""
    with pytest.raises(ModelError) as caught:
        read_spec(config)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def test_a_llama_is_read_field_by_field() -> None:
    config = LLAMA | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    }
    assert read_spec(config) == ModelSpec(
        architecture="LlamaForCausalLM",
        n_layers=30,
        hidden_size=64,
        n_heads=32,
        n_kv_heads=4,
        head_dim=2,
        ffn_size=96,
        vocab_size=100,
        max_context_tokens=4096,
        norm="rms",
        norm_eps=1e-5,
        norm_affine=True,
        final_norm=True,
        activation="silu",
        activation_threshold=0.0,
        gated=True,
        qkv_bias=False,
        attention_output_bias=False,
        ffn_bias=False,
        qk_norm=False,
        rope=RopeSpec(5e5, 2),
        learned_position_offset=None,
        sliding_windows=(None,) * 30,
        tied_head=True,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_object_dict_file_and_folder_give_the_same_spec(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    config.save_pretrained(tmp_path)
    expected = read_spec(config)
    assert read_spec(config.to_dict()) == expected
    assert read_spec(tmp_path / "config.json") == expected
    assert read_spec(str(tmp_path)) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_the_spelling_of_transformers_4_gives_the_same_spec(name: str) -> None:
    config = config_of(name).to_dict()
    rope = dict(config.pop("rope_parameters", None) or {})
    expected = read_spec(config_of(name))
    if near := rope.get("sliding_attention"):
        rope = dict(rope["full_attention"])
        config["rope_local_base_freq"] = near["rope_theta"]
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in rope:
            config[field] = rope.pop(field)
    for type_field in ("rope_type", "type"):
        kind = rope.get("rope_type", "default")
        rest = {key: value for key, value in rope.items() if key != "rope_type"}
        scaling = None if kind == "default" else {type_field: kind} | rest
        assert read_spec(config | {"rope_scaling": scaling}) == expected


@pytest.mark.parametrize("prefix", PREFIXES)
def test_missing_fields_mean_what_they_mean_to_transformers(prefix: str) -> None:
    needed = required(prefix)
    theirs = config_class(prefix)(**needed)
    assert read_spec(needed) == read_spec(theirs)
    if prefix.startswith("Qwen"):
        windowed = needed | {"use_sliding_window": True}
        theirs = getattr(transformers, f"{prefix}Config")(**windowed)
        assert read_spec(windowed) == read_spec(theirs)
        assert read_spec(windowed).sliding_windows == (None,) * 28 + (4096,) * 2


@pytest.mark.parametrize("prefix", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"])
def test_null_fields_mean_what_they_mean_to_transformers(prefix: str) -> None:
    nulls: dict[str, Any] = {"sliding_window": None, "rope_scaling": None}
    if prefix != "Mistral":  # where transformers 5 refuses it
        nulls["num_key_value_heads"] = None
    if prefix.startswith("Qwen"):
        nulls["use_sliding_window"] = True
    elif prefix != "Phi3":
        nulls["head_dim"] = None
    config = required(prefix) | nulls
    assert read_spec(config) == read_spec(getattr(transformers, f"{prefix}Config")(**config))


def test_model_type_stands_in_for_missing_architectures() -> None:
    for prefix in PREFIXES:
        config = required(prefix)
        expected = read_spec(config)
        for architectures in ({}, {"architectures": None}, {"architectures": []}):
            named = {key: value for key, value in config.items() if key != "architectures"} | architectures
            assert read_spec(named | {"model_type": config_class(prefix).model_type}) == expected


def test_prosparse_is_llama_with_fatrelu() -> None:
    config = LLAMA | {
        "architectures": ["SparseLlamaForCausalLM"],
        "model_type": "sparsellama",
        "hidden_act": "fatrelu",
        "hidden_act_param": 0.01,
        "auto_map": {"AutoModelForCausalLM": "modeling_sparsellama.SparseLlamaForCausalLM"},
    }
    spec = read_spec(config)
    assert (spec.activation, spec.activation_threshold, spec.gated) == ("fatrelu", 0.01, True)
    expected = read_spec(LLAMA | {"hidden_act": "fatrelu", "hidden_act_param": 0.01})
    assert spec == replace(expected, architecture="SparseLlamaForCausalLM")
    assert read_spec(LLAMA | {"hidden_act": "relu", "hidden_act_param": 0.01}).activation_threshold == 0


def test_auto_map_is_ignored_wherever_it_stands() -> None:
    mapped = {"auto_map": {"AutoConfig": "evil--code"}, "trust_remote_code": True}
    assert read_spec(LLAMA | mapped | {"vision_config": mapped}) == read_spec(LLAMA)


def test_layer_types_place_the_windows() -> None:
    kinds = ["full_attention", "sliding_attention"] * 15
    config = required("Qwen2") | {"use_sliding_window": True, "sliding_window": 9, "layer_types": kinds}
    assert read_spec(config).sliding_windows == (None, 9) * 15


def test_unknown_architectures_are_answered_with_the_list() -> None:
    for change in (
        {"architectures": ["MambaForCausalLM"]},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": [5]},
        {"architectures": [{}]},
        {"architectures": None},
        {"architectures": "LlamaForCausalLM"},
    ):
        message = refusal(LLAMA | change)
        assert "is not supported" in message
        listed = re.findall(r"(\w+)(?:\(([\w|]+)\))?(?=,| \(each)", message.partition("supported are ")[2])
        names = {stem + ending for stem, endings in listed for ending in ("", *endings.split("|"))}
        assert names >= {*PREFIXES, "SparseLlama"}
    assert "MambaForCausalLM" in refusal(LLAMA | {"architectures": ["MambaForCausalLM"]})


def test_quantized_checkpoints_are_refused() -> None:
    assert "quantization_config" in refusal(LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 3}})


SIZES = ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings"]
NO_SIZES: list[Any] = [0, -1, 1.5, "64", True, [64], {}, math.nan, math.inf, 2**24 + 1, 10**12, 10**400, 10**5000]
NO_NUMBERS: list[Any] = [-1, "1", True, [1], {}, math.nan, math.inf, -math.inf, 10**13, 10**400, 10**5000]
NO_FLAGS: list[Any] = [1, 0, "true", [True]]
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
MALFORMED: list[tuple[dict[str, Any], str, list[Any]]] = [
    *((LLAMA, name, NO_SIZES) for name in [*SIZES, "intermediate_size", "num_key_value_heads", "head_dim"]),
    *((OPT, name, NO_SIZES) for name in [*SIZES, "ffn_dim", "word_embed_proj_dim"]),
    (LLAMA, "num_hidden_layers", [1001]),
    (LLAMA, "num_key_value_heads", [3, 64]),
    (LLAMA, "num_attention_heads", [7, 65]),
    (OPT, "num_attention_heads", [7, 65]),
    (LLAMA, "head_dim", [1, 3]),
    (LLAMA, "hidden_act", ["tanh", "", 5, ["silu"]]),
    (OPT, "activation_function", ["tanh", 5]),
    (LLAMA | {"hidden_act": "fatrelu"}, "hidden_act_param", NO_NUMBERS),
    (LLAMA, "rms_norm_eps", NO_NUMBERS),
    (LLAMA, "rope_theta", [*NO_NUMBERS, 0, 1e-300]),
    (LLAMA, "partial_rotary_factor", NO_NUMBERS),
    (LLAMA | {"rope_scaling": LINEAR}, "partial_rotary_factor", [*NO_NUMBERS, 0, 0.1, 0.5, 2]),
    (required("Phi3"), "partial_rotary_factor", [*NO_NUMBERS, 0, 0.001, 2]),
    *((LLAMA, name, NO_FLAGS) for name in ("attention_bias", "mlp_bias", "tie_word_embeddings")),
    *((OPT, name, NO_FLAGS) for name in ("enable_bias", "do_layer_norm_before", "_remove_final_layer_norm")),
    (OPT, "layer_norm_elementwise_affine", NO_FLAGS),
    (LLAMA, "model_type", [5, ["llama"]]),
    (LLAMA, "rope_parameters", ["linear", 5, [1]]),
    (LLAMA, "rope_scaling", ["linear", 5, [1]]),
    (required("Mistral"), "sliding_window", NO_SIZES),
    (required("Phi3"), "sliding_window", NO_SIZES),
    (required("Qwen2") | {"use_sliding_window": True}, "sliding_window", NO_SIZES),
    (required("Qwen2"), "use_sliding_window", NO_FLAGS),
    (required("Qwen2") | {"use_sliding_window": True}, "max_window_layers", NO_NUMBERS),
    (
        required("Qwen2") | {"use_sliding_window": True},
        "layer_types",
        [5, ["full_attention"], ["mamba"] * 30, [[]] * 30],
    ),
]
MALFORMED_ROPE: list[tuple[str, list[Any]]] = [
    ("rope_type", ["axial", "YaRN", 5, ["linear"]]),
    ("rope_theta", [*NO_NUMBERS, 0, 1e-300]),
    ("factor", [*NO_NUMBERS, 0, 0.5, None]),
    ("low_freq_factor", [*NO_NUMBERS, 4, 5]),
    ("high_freq_factor", [*NO_NUMBERS, 0, 1]),
    ("original_max_position_embeddings", NO_SIZES),
]


@pytest.mark.parametrize(
    ("config", "field", "values"),
    MALFORMED,
    ids=[f"{config['architectures'][0]}-{name}" for config, name, _ in MALFORMED],
)
def test_malformed_fields_are_refused_by_name(config: dict[str, Any], field: str, values: list[Any]) -> None:
    for value in values:
        assert field in refusal(config | {field: value})


@pytest.mark.parametrize(("field", "values"), MALFORMED_ROPE, ids=[name for name, _ in MALFORMED_ROPE])
def test_malformed_rope_fields_are_refused_by_name(field: str, values: list[Any]) -> None:
    for section in ("rope_parameters", "rope_scaling"):
        for kind in ("linear", "llama3", "dynamic"):
            for value in values:
                changed = LINEAR | {"rope_type": kind, field: value}
                assert field in refusal(LLAMA | {section: changed})


MALFORMED_YARN: list[tuple[str, list[Any]]] = [
    ("rope_theta", [1, 0.5]),
    ("factor", [*NO_NUMBERS, 0, 0.5, 1e7]),
    ("beta_fast", [*NO_NUMBERS, 0.5, 1e7]),
    ("beta_slow", [*NO_NUMBERS, 33, 1e-4]),
    ("mscale", NO_NUMBERS),
    ("mscale_all_dim", NO_NUMBERS),
    ("attention_factor", NO_NUMBERS),
    ("truncate", NO_FLAGS),
    ("original_max_position_embeddings", NO_SIZES),
    ("beta", [1.0]),
]


@pytest.mark.parametrize(("field", "values"), MALFORMED_YARN, ids=[name for name, _ in MALFORMED_YARN])
def test_malformed_yarn_is_refused_by_name(field: str, values: list[Any]) -> None:
    good = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    for section in ("rope_parameters", "rope_scaling"):
        for value in values:
            assert field in refusal(LLAMA | {section: good | {field: value}})


def test_what_one_rope_type_has_another_has_not() -> None:
    for field in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"):
        assert field in refusal(LLAMA | {"rope_parameters": LINEAR | {field: 1.0}})
    assert "factor is missing" in refusal(LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}})
    two = LLAMA | {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    assert "dynamic with 2 features" in refusal(two)


def test_longrope_needs_a_factor_for_every_pair() -> None:
    good = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    spec = read_spec(LLAMA | {"rope_parameters": good | {"original_max_position_embeddings": 20}, "head_dim": 32})
    assert spec.max_context_tokens == 20 and not spec.context_is_fixed
    spec = read_spec(LLAMA | {"rope_parameters": good, "head_dim": 32})  # no more than it has in all
    assert spec.max_context_tokens == 2048
    for name in ("short_factor", "long_factor"):
        for wrong in ([1.0] * 15, [1.0] * 15 + [0], [1.0] * 15 + [float("nan")], [1.0] * 15 + ["1"], 3, None):
            assert name in refusal(LLAMA | {"rope_parameters": good | {name: wrong}, "head_dim": 32})


def test_rope_fields_that_nobody_reads_are_refused() -> None:
    nested = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}
    assert "full_attention" in refusal(LLAMA | {"rope_parameters": nested})


@pytest.mark.parametrize("prefix", ["Llama", "OPT"])
def test_required_fields_are_named_when_they_are_missing(prefix: str) -> None:
    for field in set(required(prefix)) - {"architectures"}:
        config = required(prefix)
        del config[field]
        assert f"field {field} is missing" in refusal(config)
        assert f"field {field} is missing" in refusal(config | {field: None})


def test_opt_350m_is_refused() -> None:
    assert "opt-350m" in refusal(OPT | {"do_layer_norm_before": False})
    assert "opt-350m" in refusal(OPT | {"word_embed_proj_dim": 32})


def test_what_is_no_configuration_is_refused() -> None:
    for thing in (None, 5, [LLAMA], object()):
        assert "expected a configuration" in refusal(thing)


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "cut": (json.dumps(LLAMA).encode()[:-5], "not valid JSON"),
    "not utf-8": (b'{"hidden_size": "\xff"}', "not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "deep object": (b'{"a":' * 100_000, "not valid JSON"),
    "huge number": (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    "list": (b"[1]", "holds a list"),
    "string": (b'"LlamaForCausalLM"', "holds a str"),
    "null": (b"null", "holds a NoneType"),
    "nan": (json.dumps(LLAMA | {"rms_norm_eps": math.nan}).encode(), "rms_norm_eps is nan"),
    "infinite": (json.dumps(LLAMA | {"rope_theta": math.inf}).encode(), "rope_theta is inf"),
    "many layers": (json.dumps(LLAMA | {"num_hidden_layers": 10**12}).encode(), "num_hidden_layers is 1000000000000"),
    "11 MB": (b" " * 11_000_000 + json.dumps(LLAMA).encode(), "11000"),
}


@pytest.mark.parametrize("name", FILES)
def test_malformed_files_are_refused(name: str, tmp_path: Path) -> None:
    content, sentence = FILES[name]
    (tmp_path / "config.json").write_bytes(content)
    message = refusal(tmp_path)
    assert sentence in message and str(tmp_path) in message


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)
    assert "no-such-folder is missing" in refusal(tmp_path / "no-such-folder")


def test_a_file_the_system_does_not_give_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def denied(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert "Permission denied" in refusal(tmp_path)


def test_linear_and_llama3_scaling_are_read() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 512,
    }
    spec = read_spec(LLAMA | {"rope_theta": 5e5, "rope_scaling": llama3})
    assert spec.rope == RopeSpec(5e5, 2, RopeScaling("llama3", 8.0, 1.5, 3.0, 512))
    spec = read_spec(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert spec.rope is not None and (spec.rope.scaling.kind, spec.rope.scaling.factor) == ("linear", 2.0)
