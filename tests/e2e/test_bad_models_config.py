"""config.json and generation_config.json that are damaged, hostile or unfit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import ModelError
from tests.bad_models import CONFIG, GENERATION, check_refusal, content, edit_json, sparse

LONG_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4} | LONG_FACTORS
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "cut": (b'{"architectures": ["LlamaForCausalLM"], "hid', "not valid JSON"),
    "zeros": (bytes(500), "begins with zeros"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "git lfs pull"),
    "web page": (b"<!doctype html><html><title>Sign in</title></html>", "web page"),
    "error page in XML": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "web page"),
    "UTF-16": (json.dumps({"model_type": "llama"}).encode("utf-16"), "UTF-16"),
    "UTF-16 without a mark": ('{"a": 1}'.encode("utf-16-le"), "not valid JSON"),
    "Latin-1": ('{"author": "Jos\u00e9"}'.encode("latin-1"), "not valid JSON"),
    "byte order mark": (b'\xef\xbb\xbf{"model_type": "llama"}', "byte order mark"),
    "comments": (b'{\n// the model\n"model_type": "llama"}', "not valid JSON"),
    "single quotes": (b"{'model_type': 'llama'}", "not valid JSON"),
    "trailing comma": (b'{"model_type": "llama",}', "not valid JSON"),
    "Python": (b"import os; os.system('true')", "not valid JSON"),
    "pickle": (b"\x80\x04\x95\x10\0\0\0", "pickle"),
    "zip": (b"PK\x03\x04aaaa", "zip archive"),
    "list": (b"[1]", "holds a list"),
    "string": (b'"llama"', "holds a str"),
    "null": (b"null", "holds a NoneType"),
    "number": (b"1", "holds a int"),
    "number of 5000 digits": (b'{"vocab_size": ' + b"9" * 5000 + b"}", "limit (4300 digits)"),
    "deep lists": (b'{"a":' + b"[" * 400_000, "nested too deeply"),
    "65 levels": (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "at most 64 levels"),
    "900 levels": (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "at most 64 levels"),
    "10 MB of objects": (b'{"a":[' + b'{"a":0},' * 1_200_000 + b"0]}", "values, expected at most"),
    "2 million numbers": (b'{"a":[' + b"0," * 2_000_000 + b"0]}", "values, expected at most"),
}
# A field of the good model's, its value, and words of the error.
FIELDS: list[tuple[str, Any, str]] = [
    ("architectures", ["GPT2LMHeadModel"], "'GPT2LMHeadModel' is not supported; supported are DeepseekV2"),
    ("architectures", ["\x1b]0;hello\x07"], "\\x1b]0;hello\\x07"),
    ("architectures", ["x" * 10**6], "is not supported"),
    ("architectures", [["LlamaForCausalLM"]], "is not supported"),
    ("architectures", [{"a": 1}], "is not supported"),
    ("architectures", [7], "is not supported"),
    ("hidden_size", None, "hidden_size is missing"),
    ("hidden_size", 0, "hidden_size is 0"),
    ("hidden_size", -48, "hidden_size is -48"),
    ("hidden_size", 48.0, "hidden_size is 48.0"),
    ("hidden_size", "48", "hidden_size is '48'"),
    ("hidden_size", True, "hidden_size is True"),
    ("hidden_size", [48], "hidden_size is [48]"),
    ("hidden_size", {"value": 48}, "hidden_size is {'value': 48}"),
    ("hidden_size", 10**30, "hidden_size is 1000"),
    ("hidden_size", int("9" * 4000), "hidden_size is 9999"),
    ("hidden_size", float("nan"), "hidden_size is nan"),
    ("num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000"),
    ("num_hidden_layers", -1, "num_hidden_layers is -1"),
    ("num_hidden_layers", 1001, "expected a whole number from 1 to 1000"),
    ("vocab_size", 10**9, "vocab_size is 1000000000"),
    ("vocab_size", 2**63, "vocab_size is 9223372036854775808"),
    ("vocab_size", False, "vocab_size is False"),
    ("intermediate_size", None, "intermediate_size is missing"),
    ("intermediate_size", 1e300, "intermediate_size is 1e+300"),
    ("num_attention_heads", 0, "num_attention_heads is 0"),
    ("num_attention_heads", "six", "num_attention_heads is 'six'"),
    ("num_key_value_heads", 4, "not a multiple of num_key_value_heads 4"),
    ("num_key_value_heads", 7, "not a multiple of num_key_value_heads 7"),
    ("head_dim", 7, "expected an even number"),
    ("head_dim", 1, "expected an even number"),
    ("head_dim", -8, "head_dim is -8"),
    ("max_position_embeddings", 10**12, "max_position_embeddings is 1000000000000"),
    ("max_position_embeddings", 0, "max_position_embeddings is 0"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
    ("rms_norm_eps", float("inf"), "rms_norm_eps is inf"),
    ("rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06"),
    ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6'"),
    ("rms_norm_eps", 10**400, "rms_norm_eps is 1000"),
    ("hidden_act", "sigmoid", "hidden_act is 'sigmoid'"),
    ("hidden_act", ["silu"], "hidden_act is ['silu']"),
    ("hidden_act", "__import__('os')", "which is not supported"),
    ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'"),
    ("tie_word_embeddings", 1, "tie_word_embeddings is 1"),
    ("attention_bias", [], "attention_bias is []"),
    ("quantization_config", {"quant_method": "hqq", "bits": 4}, "quantization by 'hqq' is not supported"),
    ("quantization_config", {"quant_method": 7}, "quant_method is 7"),
    ("quantization_config", "4bit", "quantization_config is '4bit'"),
    ("quantization_config", [1], "quantization_config is [1]"),
    ("rope_parameters", [1], "rope_parameters is [1]"),
    ("rope_parameters", 5, "rope_parameters is 5"),
    ("rope_parameters", {"rope_theta": float("nan")}, "rope_theta is nan"),
    ("rope_parameters", {"rope_theta": 0.5}, "rope_theta is 0.5"),
    ("rope_parameters", {"rope_theta": -1e4}, "rope_theta is -10000"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yam"}, "rope_type 'yam' is not supported"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn"}, "factor is missing"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "beta_slow": 40}, "beta_slow 40"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "dynamic", "factor": -1}, "factor is -1"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": ["linear"]}, "rope_type is ['linear']"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "linear"}, "factor is missing"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}, "rope factor 0"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "linear", "factor": 1e13}, "factor is 10000000000000"),
    ("rope_parameters", {"rope_theta": 1e4, "beta": 1}, "field 'beta' is not supported"),
    ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
    (
        "rope_parameters",
        {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5, which this architecture does not have with rope_type linear",
    ),
    ("rope_parameters", LONGROPE | {"short_factor": [1.0] * 3}, "expected 4 numbers"),
    ("rope_parameters", LONGROPE | {"short_factor": [1.0, 1.0, 1.0, 0.0]}, "expected 4 numbers"),
    ("rope_parameters", LONGROPE | {"short_factor": [1.0, 1.0, 1.0, 1e-320]}, "expected 4 numbers"),
    ("rope_parameters", LONGROPE | {"short_factor": [1.0, 1.0, 1.0, 10**400]}, "expected 4 numbers"),
    ("rope_parameters", LONGROPE | {"short_factor": [1.0, 1.0, 1.0, float("nan")]}, "expected 4 numbers"),
    ("rope_parameters", LONGROPE | {"short_factor": "1111"}, "expected 4 numbers"),
    ("rope_parameters", LONGROPE | {"long_factor": [1.0] * 5}, "long_factor is [1.0"),
    ("rope_parameters", LONGROPE | {"original_max_position_embeddings": 1}, "whole number from 2"),
    ("rope_parameters", LONGROPE | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
    ("rope_parameters", LONGROPE | {"attention_factor": float("inf")}, "attention_factor is inf"),
]
GENERATIONS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "list": (b"[]", "holds a list"),
    "cut": (b'{"temperature":', "not valid JSON"),
    "web page": (b"<html>", "web page"),
    "UTF-16": ("{}".encode("utf-16"), "UTF-16"),
    "deep": (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply"),
    "temperature NaN": (b'{"do_sample": true, "temperature": NaN}', "temperature is nan"),
    "temperature negative": (b'{"do_sample": true, "temperature": -1}', "temperature is -1"),
    "temperature a string": (b'{"do_sample": true, "temperature": "hot"}', "temperature is 'hot'"),
    "top_k of 10^30": (b'{"do_sample": true, "top_k": ' + b"1" + b"0" * 30 + b"}", "top_k is 1000"),
    "top_p above 1": (b'{"do_sample": true, "top_p": 1.5}', "top_p is 1.5"),
    "repetition penalty a list": (b'{"repetition_penalty": [1]}', "is [1]"),
}
HARMLESS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "code for transformers": lambda config: config.update(
        auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    ),
    "code further in": lambda config: config.update(
        text_config={"auto_map": {"AutoModel": "evil.Evil"}}, vision_config={"auto_map": {"AutoModel": "evil.Evil"}}
    ),
    "unknown fields": lambda config: config.update(
        {"\x1b[2J": "x", "torch_dtype": {"a": [1]}, "_name_or_path": "/etc"}
    ),
    "NaN where nobody looks": lambda config: config.update(initializer_range=float("nan")),
    "a context of 2^24": lambda config: config.update(max_position_embeddings=2**24),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_configuration_is_refused(own_tiny: Path, cache: Path, name: str) -> None:
    data, words = FILES[name]
    (own_tiny / CONFIG).write_bytes(data)
    check_refusal(own_tiny, cache, ModelError, words)


@pytest.mark.parametrize(("field", "value", "words"), FIELDS, ids=[f"{i}-{case[0]}" for i, case in enumerate(FIELDS)])
def test_an_impossible_field_is_refused(own_tiny: Path, cache: Path, field: str, value: Any, words: str) -> None:
    edit_json(CONFIG, lambda config: config.update({field: value}))(own_tiny)
    check_refusal(own_tiny, cache, ModelError, words)


def test_enormous_configurations_are_refused_unread(own_tiny: Path, cache: Path) -> None:
    for name in (CONFIG, GENERATION):
        before = (own_tiny / name).read_bytes() if (own_tiny / name).exists() else b"{}"
        for n_bytes in (11 * 2**20, 5 * 2**30, 2**40):
            sparse(name, n_bytes)(own_tiny)
            check_refusal(own_tiny, cache, ModelError, f"{name} has {n_bytes} bytes")
        (own_tiny / name).write_bytes(before)


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_damaged_generation_configuration_is_refused(own_tiny: Path, cache: Path, name: str) -> None:
    data, words = GENERATIONS[name]
    content(GENERATION, data)(own_tiny)
    check_refusal(own_tiny, cache, ModelError, words)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_matter_is_ignored_and_no_code_runs(own_tiny: Path, name: str) -> None:
    from hetero_ee import Engine

    marker = own_tiny / "ran"
    (own_tiny / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    edit_json(CONFIG, HARMLESS[name])(own_tiny)
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        assert engine.generate("a", max_new_tokens=2).n_generated_tokens == 2
    assert not marker.exists()
