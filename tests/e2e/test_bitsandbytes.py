"""Checkpoints that transformers and bitsandbytes saved in 4 bits, against bitsandbytes itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hetero_ee import Engine
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.layers.tensors import TensorRole
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import cached_store, convert
from hetero_ee.weights.store.reader import open_store

VARIANTS = {
    "nf4": ("nf4", False),
    "nf4-double": ("nf4", True),
    "fp4": ("fp4", False),
    "fp4-double": ("fp4", True),
}
STORY = """Once upon a time, there was a little boy named Sam who had a red kite. Every morning he ran up the green hill
behind his house and let the kite fly high in the sky. One windy day the string broke, and the kite flew away over the
trees. Sam was very sad and began to cry. His friend Mia heard him and asked, "What is wrong, Sam?" Sam told her about
the kite. "Don't worry," said Mia. "We can look for it together." They walked into the forest and looked behind every
bush. A small brown squirrel sat on a log and watched them. "Have you seen a red kite?" asked Mia. The squirrel pointed
to a tall oak tree. High up in the branches they saw something red. Sam was too small to climb the tree, but the
squirrel was very fast. It ran up and pulled the kite free. "Thank you, little squirrel!" said Sam. He gave it a big
nut from his pocket. Then Sam and Mia went home and tied a new string to the kite. They were all very happy."""
# Squared errors relative to the weights' squares, of a whole model and of the worst matrix, table and fp16 scales
# together. FORMAT.md states them.
LARGEST_ERROR = {"nf4": (2.5e-5, 4e-5), "fp4": (1.6e-5, 6e-5)}


@pytest.fixture(scope="session", params=VARIANTS)
def four_bit(request: pytest.FixtureRequest, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model saved by bitsandbytes, before any pass: a pass on the CPU repacks its tensors."""
    import transformers

    kind, nested = VARIANTS[request.param]
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    folder = tmp_path_factory.mktemp("four-bit") / request.param
    model = transformers.AutoModelForCausalLM.from_pretrained(demo, quantization_config=config, device_map="cpu")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    return folder


@pytest.fixture(scope="session")
def kind(four_bit: Path) -> str:
    return VARIANTS[four_bit.name][0]


@pytest.fixture(scope="session")
def spec(four_bit: Path) -> ModelSpec:
    return read_spec(four_bit)


@pytest.fixture(scope="session")
def theirs(four_bit: Path) -> dict[str, Tensor]:
    """What bitsandbytes makes of each matrix, in fp32; the other tensors in fp32."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    saved = load_file(four_bit / "model.safetensors")
    values = {name: tensor.float() for name, tensor in saved.items() if tensor.dtype == torch.bfloat16}
    for name in (name for name, tensor in saved.items() if tensor.dtype == torch.uint8 and name.endswith(".weight")):
        state = QuantState.from_dict({k: v for k, v in saved.items() if k.startswith(f"{name}.")}, torch.device("cpu"))
        state.dtype = torch.float32
        values[name] = dequantize_4bit(saved[name], state)
    return values


@pytest.fixture(scope="session")
def store(four_bit: Path, spec: ModelSpec) -> Path:
    return convert(four_bit, spec, four_bit.parent / "store", Quantization.of_model(four_bit, None))


def squared_error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Sum of squared errors, and of the squares that it is relative to."""
    return float((found.double() - expected.double()).square().sum()), float(expected.double().square().sum())


@pytest.mark.sample(0)
def test_weights_are_those_that_bitsandbytes_computes(
    four_bit: Path, spec: ModelSpec, theirs: dict[str, Tensor]
) -> None:
    checkpoint = Checkpoint(four_bit, spec)
    for layer in range(spec.n_layers):
        down = checkpoint.tensor(f"layers.{layer}.ffn.down")
        assert torch.equal(down, theirs[f"model.layers.{layer}.mlp.down_proj.weight"])
        parts = [theirs[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(checkpoint.tensor(f"layers.{layer}.attention.qkv"), torch.cat(parts))


@pytest.mark.sample(1)
def test_the_store_has_their_codes(four_bit: Path, spec: ModelSpec, store: Path, kind: str) -> None:
    """What is lost is what the table and the scales lose, rounded to int8 and fp16."""
    checkpoint, weights = Checkpoint(four_bit, spec), open_store(store, spec)
    matrices = [tensor.name for tensor in checkpoint.tensors() if tensor.role is TensorRole.MATRIX]
    errors = [squared_error(weights.matrices[name].dequantize(), checkpoint.tensor(name)) for name in matrices]
    of_model, of_matrix = LARGEST_ERROR[kind]
    assert max(error / square for error, square in errors) < of_matrix
    assert sum(error for error, _ in errors) / sum(square for _, square in errors) < of_model
    manifest = json.loads((store / "manifest.json").read_text())
    assert (manifest["quantizer"], manifest["vocabulary_quantizer"]) == (kind, "int8")


@pytest.mark.sample(1)
def test_the_store_predicts_what_bitsandbytes_predicts(four_bit: Path, spec: ModelSpec, store: Path) -> None:
    """Both round activations, the store to int8 and bitsandbytes to bfloat16; docs/quality.md has the figures."""
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(four_bit)(STORY)["input_ids"]
    assert len(ids) > 200
    executor = CpuExecutor(spec, open_store(store, spec), len(ids), threads=1)
    executor.cache.open(0)
    ours = executor.logits(Batch.of_sequence(0, 0, ids), range(len(ids)))
    executor.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(four_bit, device_map="cpu")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    expected, found = (torch.log_softmax(each.double(), -1) for each in (logits, ours))
    assert float((expected.exp() * (expected - found)).sum(-1).mean()) < 5e-4
    assert float((expected.argmax(-1) == found.argmax(-1)).double().mean()) > 0.97


@pytest.mark.sample(0)
def test_unquantized_it_says_what_transformers_says(demo: Path, four_bit: Path, theirs: dict[str, Tensor]) -> None:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    missing = model.load_state_dict(theirs, strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied
    prompt = transformers.AutoTokenizer.from_pretrained(demo)("Once upon a time", return_tensors="pt")["input_ids"]
    expected = model.generate(prompt, max_new_tokens=60, do_sample=False)[0, prompt.shape[1] :].tolist()
    with Engine.from_pretrained(four_bit, quantizer="none", threads=1) as engine:
        assert list(engine.generate("Once upon a time", max_new_tokens=60, temperature=0.0).token_ids) == expected
        assert engine.quantizer == "none"


@pytest.mark.sample(0)
def test_an_engine_keeps_the_checkpoints_own_bits_unless_told_otherwise(four_bit: Path, kind: str, cache: Path) -> None:
    said = {}
    for quantizer in (None, "rtn"):
        with Engine.from_pretrained(four_bit, quantizer=quantizer, threads=1) as engine:
            assert engine.quantizer == (quantizer or kind)
            said[quantizer] = engine.generate("Once upon a time", max_new_tokens=60).token_ids
    assert said[None] != said["rtn"]
    assert len(list(cache.glob("stores/*/manifest.json"))) == 2


def test_stores_of_one_checkpoint_are_told_apart(four_bit: Path, kind: str, tmp_path: Path) -> None:
    chosen = [Quantization.of_model(four_bit, quantizer) for quantizer in (None, "codebook", "nf4", "rtn")]
    assert len({cached_store(four_bit, quantization, tmp_path) for quantization in chosen}) == 4
    assert [quantization.name for quantization in chosen] == [kind, "codebook", "nf4", "rtn"]
    assert [quantization.own for quantization in chosen] == [kind, None, "nf4" if kind == "nf4" else None, None]
