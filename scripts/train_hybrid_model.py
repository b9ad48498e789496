"""Train, export and measure the small hybrids used in tests: Qwen3.5's layers with its MTP head, or with experts.

    python scripts/train_hybrid_model.py --data DIR --output DIR [--num-experts 64] [--evaluate FILE]

DIR holds texts: stories, a ``<|endoftext|>`` line after each. The tokenizer is the bundled demo model's. Started
again, an interrupted run continues (``--steps`` may then differ). Without ``--data``, the model in the output folder is
only measured; with ``--export`` the state of a run that has not ended is written. Figures are printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hybrid_model import N_AHEAD, HybridModel
from muon import make_optimizers, sort_parameters
from safetensors.torch import load_file, save_file
from stories import parse_settings, read_stories, without_held_out
from torch import Tensor
from training_run import (
    RunSettings,
    TrainingRun,
    encode_stories,
    evaluation,
    read_checkpoint,
    training_stories,
    windows,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

DEMO = Path(__file__).parents[1] / "hetero_ee" / "assets" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Settings(RunSettings):
    """Everything that defines a run; each field is also a command-line flag."""

    batch: int = field(default=4, metadata={"help": "windows in a step"})
    steps: int = field(default=600, metadata={"help": "optimiser steps"})
    dropout: float = field(default=0.0, metadata={"help": "dropout on what each sub-layer adds to the stream"})
    log_every: int = field(default=100, metadata={"help": "steps between validations"})
    save_seconds: float = field(default=120.0, metadata={"help": "seconds between checkpoints"})
    num_hidden_layers: int = field(default=8, metadata={"help": "layers; every fourth one is an attention"})
    hidden_size: int = field(default=128, metadata={"help": "width of the residual stream"})
    intermediate_size: int = field(default=384, metadata={"help": "width of the feed-forward layers without experts"})
    num_attention_heads: int = field(default=4, metadata={"help": "query heads"})
    num_key_value_heads: int = field(default=2, metadata={"help": "key and value heads"})
    head_dim: int = field(default=32, metadata={"help": "size of a head, of attentions and delta layers"})
    linear_num_key_heads: int = field(default=2, metadata={"help": "key heads of delta layers"})
    linear_num_value_heads: int = field(default=4, metadata={"help": "value heads of delta layers"})
    num_experts: int = field(default=0, metadata={"help": "routed experts of a layer; 0 for a dense model"})
    num_experts_per_tok: int = field(default=4, metadata={"help": "experts of a token"})
    moe_intermediate_size: int = field(default=32, metadata={"help": "width of an expert"})
    shared_expert_intermediate_size: int = field(default=64, metadata={"help": "width of the shared expert"})
    mtp_weight: float = field(default=0.3, metadata={"help": "weight of the mean loss of the further tokens"})
    balance_weight: float = field(default=0.003, metadata={"help": "weight of the experts' balance loss"})

    def smoke(self) -> Settings:
        """A run of seconds, to test the path from text to loadable model."""
        tiny = replace(self, num_hidden_layers=4, hidden_size=32, intermediate_size=64, context=64, head_dim=16)
        return replace(tiny, batch=2, steps=4, warmup=1, holdout_every=4, moe_intermediate_size=16)


def make_model(settings: Settings, tokenizer: Any) -> Any:
    """A transformers model of the settings' shape; the config of one without experts announces the head."""
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["linear_num_key_heads", "linear_num_value_heads"]
    experts = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"]
    names += experts if settings.num_experts else ["intermediate_size"]
    shape: dict[str, Any] = {name: getattr(settings, name) for name in names} | {"vocab_size": len(tokenizer)}
    shape |= {"linear_key_head_dim": settings.head_dim, "linear_value_head_dim": settings.head_dim}
    shape |= {"max_position_embeddings": 8 * settings.context, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    shape |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "rope_parameters": rope}
    shape |= {"mtp_num_hidden_layers": int(not settings.num_experts), "mtp_use_dedicated_embeddings": False}
    if settings.num_experts:
        return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**shape))
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape))


def is_small(name: str, parameter: Tensor) -> bool:
    """Whether AdamW trains a parameter instead of Muon: vectors, convolutions, gates and routers."""
    return parameter.ndim == 1 or "conv1d" in name or ".gate." in name or min(parameter.shape[-2:]) < 16


class HybridRun(TrainingRun):
    """A hybrid's run: every step adds the losses of the further tokens and, with experts, the balance loss."""

    def __init__(self, model: HybridModel, settings: Settings, checkpoint: Path) -> None:
        precision = getattr(torch, settings.precision)
        rates, decays = (settings.muon_rate, settings.adam_rate), (settings.weight_decay, settings.embed_decay)
        optimizers = make_optimizers(sort_parameters(model.weights, is_small), rates, decays, precision)
        super().__init__(model.weights, optimizers, settings, checkpoint)
        self.model, self.shape = model, settings

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        n_ahead = self.model.n_ahead if self.done % 2 else 0  # in every second step, with twice the weight
        (final, *further), balance = self.model.losses(*batch, n_ahead)
        added = sum(further) * 2 * self.shape.mtp_weight / N_AHEAD
        return final + added + self.shape.balance_weight * balance, final.item()

    def validate(self, held_out: Tensor) -> str:
        self.model.eval()
        with torch.compiler.set_stance("force_eager"):
            found = measure(self.model, held_out, self.settings.context)
        self.model.train()
        return " ".join(f"{name} {value}" for name, value in found.items())


@torch.no_grad()
def measure(model: HybridModel, stream: Tensor, length: int, batch: int = 8) -> dict[str, Any]:
    """Mean losses over a token stream in windows, in nats a token, by how far ahead the token is."""
    inputs, targets = windows(stream, min(length, len(stream) - 1))
    sums: list[float] = []
    for rows in torch.split(torch.arange(len(inputs)), batch):
        found, _ = model.losses(inputs[rows], targets[rows], model.n_ahead)
        sums = [old + loss.item() * len(rows) for old, loss in zip(sums or [0.0] * len(found), found, strict=True)]
    return {"window": length, "tokens": targets.numel(), "nats_per_token": [round(x / len(inputs), 4) for x in sums]}


@torch.no_grad()
def export(model: HybridModel, folder: Path) -> None:
    """Write the model in Hugging Face format with bf16 weights, after checking that both forwards agree."""
    model.eval()
    probe = torch.arange(2 * 128).view(2, 128)
    states, _ = model.states(probe)
    own = torch.nn.functional.linear(states, model.model.model.embed_tokens.weight)
    torch.testing.assert_close(own, model.model(probe).logits, rtol=1e-3, atol=1e-3)
    config = model.model.config
    config.architectures, config.dtype = [type(model.model).__name__], "bfloat16"
    config.save_pretrained(folder)
    named = {
        name.removeprefix("model.") if "mtp" not in name else name: x for name, x in model.weights.state_dict().items()
    }
    kept = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in named.items() if name != "lm_head.weight"}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO / name, folder / name)


def load_model(folder: Path) -> HybridModel:
    """An exported model with its head, for the forward that it was trained with."""
    model = HybridModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), 0.0, 0)
    tensors = load_file(folder / "model.safetensors")
    named = {name if name.startswith("mtp.") else f"model.{name}": tensor for name, tensor in tensors.items()}
    missing, unexpected = model.weights.load_state_dict(named, strict=False)
    assert not unexpected and set(missing) <= {"model.lm_head.weight"}, (missing, unexpected)
    return model.eval()


def evaluate(folder: Path, text: Path, settings: Settings) -> list[dict[str, Any]]:
    """Measure a model on the first characters of a text; the bytes of each separator are those of the end token."""
    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    return evaluation(partial(measure, model), tokenizer, text, settings)


def copy_matching(source: dict[str, Tensor], target: torch.nn.Module) -> None:
    """Copy the tensors that have the same names and shapes in the target; the others keep their values."""
    for name, tensor in target.state_dict().items():
        if name in source and source[name].shape == tensor.shape:
            tensor.copy_(source[name])


def train_and_export(texts: list[Path], arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """The whole way from texts to a model folder; returns what the run was."""
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    kept, held_out = without_held_out(read_stories(texts, settings.separator), settings.holdout_every)
    stories = training_stories(tokenizer, kept, settings)
    model = HybridModel(make_model(settings, tokenizer), settings.dropout, settings.seed)
    if arguments.start:
        copy_matching(read_checkpoint(arguments.start)["model"], model.weights)
    training = HybridRun(model, settings, output / "checkpoint.pt")
    if arguments.export:
        training.load()
        export(model, output)
        return {"steps": training.done, "seconds": round(training.seconds)}
    if not (arguments.no_compile or arguments.smoke):
        model.compile_parts()
    seconds = training.run(stories, torch.cat(encode_stories(tokenizer, held_out)))
    export(model, output)
    training.checkpoint.unlink()
    return training.summary(stories, seconds)


def parse_arguments() -> tuple[argparse.Namespace, Settings]:
    """The command line: where things are, and a flag for every setting."""
    parser = argparse.ArgumentParser(description="Train a small hybrid model for tests.")
    parser.add_argument("--data", type=Path, help="folder with the training texts; without it nothing is trained")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--texts", nargs="+", default=["stories_a.txt", "stories_c.txt"], help="files to train on")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="text to measure the model on")
    parser.add_argument("--start", type=Path, help="checkpoint of a run whose tensors of the same shapes are copied")
    parser.add_argument("--export", action="store_true", help="write the model of the checkpoint and train no further")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile (and a C++ compiler)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few steps; overrides the shape")
    return parse_settings(parser, Settings)


def main() -> None:
    """Train if there is data, evaluate if there is a text to evaluate on."""
    arguments, settings = parse_arguments()
    torch.set_num_threads(settings.threads)
    metrics: dict[str, Any] = {}
    if arguments.data:
        texts = [arguments.data / name for name in arguments.texts]
        metrics["training"] = train_and_export(texts, arguments, settings)
    if arguments.evaluate:
        metrics["evaluation"] = evaluate(arguments.output, arguments.evaluate, settings)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
