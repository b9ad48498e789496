"""Train, export and measure the small story-telling model used for demonstrations and tests.

    python scripts/train_demo_model.py --data DIR --output DIR [--evaluate FILE]

DIR holds texts: stories, a ``<|endoftext|>`` line after each. Every step adds to the usual loss that of one random
earlier layer, read through the same final norm and head, so that the model can be left early. Started again, an
interrupted run continues. Without ``--data``, the model in the output folder is only measured. Figures are printed.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from muon import make_optimizers, sort_parameters
from stories import parse_settings, read_stories, without_held_out
from story_model import StoryModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from training_run import RunSettings, TrainingRun, encode_stories, evaluation, training_stories, windows
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Settings(RunSettings):
    """Everything that defines a run; each field is also a command-line flag."""

    vocab_size: int = field(default=2048, metadata={"help": "entries of the byte-level BPE vocabulary"})
    num_hidden_layers: int = field(default=12, metadata={"help": "transformer layers"})
    hidden_size: int = field(default=256, metadata={"help": "width of the residual stream"})
    intermediate_size: int = field(default=704, metadata={"help": "width of the feed-forward layers"})
    num_attention_heads: int = field(default=8, metadata={"help": "query heads"})
    num_key_value_heads: int = field(default=4, metadata={"help": "key and value heads"})
    hidden_act: str = field(default="silu", metadata={"help": "activation of the gate: silu or relu"})
    activity_weight: float = field(default=0.0, metadata={"help": "weight of the sum of layers' mean activated gates"})
    exit_weight: float = field(default=0.3, metadata={"help": "weight of the random earlier layer's loss"})
    first_exit: int = field(default=2, metadata={"help": "earliest layer (from 1) that gets a loss of its own"})
    begin: str = field(default="<s>", metadata={"help": "token before every story and every prompt"})
    end: str = field(default="</s>", metadata={"help": "token after every story"})

    def smoke(self) -> Settings:
        """A run of seconds, to test the path from text to loadable model."""
        tiny = replace(self, vocab_size=300, num_hidden_layers=4, hidden_size=32, intermediate_size=64, context=64)
        return replace(tiny, num_attention_heads=4, num_key_value_heads=2, batch=2, steps=4, warmup=1, holdout_every=4)


def train_tokenizer(stories: list[str], settings: Settings) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that puts the begin token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [settings.begin, settings.end]
    trainer = trainers.BpeTrainer(vocab_size=settings.vocab_size, special_tokens=special, show_progress=False)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(stories, trainer)
    begin = (settings.begin, tokenizer.token_to_id(settings.begin))
    tokenizer.post_processor = processors.TemplateProcessing(f"{settings.begin} $A", None, [begin])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=settings.begin, eos_token=settings.end)
    wrapped.model_max_length = settings.context
    return wrapped


def model_config(settings: Settings, tokenizer: Any) -> LlamaConfig:
    """The Hugging Face configuration of the model."""
    names = ["vocab_size", "hidden_size", "intermediate_size"]
    names += ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act"]
    shape = {name: getattr(settings, name) for name in names} | {"max_position_embeddings": settings.context}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return LlamaConfig(**shape, **ends, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=True)


class DemoRun(TrainingRun):
    """The demonstration model's run: every step adds the loss of a random earlier layer, and of active gates."""

    def __init__(self, model: StoryModel, settings: Settings, checkpoint: Path) -> None:
        precision = getattr(torch, settings.precision)
        rates, decays = (settings.muon_rate, settings.adam_rate), (settings.weight_decay, settings.embed_decay)
        optimizers = make_optimizers(sort_parameters(model.llama.model), rates, decays, precision)
        super().__init__(model.llama, optimizers, settings, checkpoint)
        self.model, self.shape = model, settings

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        settings = self.shape
        choice = random.Random(f"{settings.seed}-exit-{self.done}")
        early = choice.randrange(settings.first_exit, settings.num_hidden_layers)
        states, activity = self.model.states(batch[0])
        final = self.model.loss(states[-1], batch[1])
        exiting = self.model.loss(states[early - 1], batch[1])
        return final + settings.exit_weight * exiting + settings.activity_weight * activity, final.item()

    def validate(self, held_out: Tensor) -> str:
        found = measure(self.model.llama, held_out, self.settings.context)
        zeros = sum(found["layer_zeros"]) / self.shape.num_hidden_layers
        return f"held-out {found['nats_per_token']:.4f} zero gates {zeros:.3f}"


@torch.no_grad()
def export(model: StoryModel, tokenizer: Any, folder: Path) -> None:
    """Write the model in Hugging Face format with bf16 weights, after checking that both forwards agree."""
    model.eval()
    probe = torch.arange(2 * 32).view(2, 32)
    torch.testing.assert_close(
        model.logits(model.states(probe)[0][-1]), model.llama(probe).logits, rtol=1e-3, atol=1e-3
    )
    model.llama.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def zero_counter(count: Tensor) -> Any:
    """A hook that adds to `count`, summed over tokens, the share of an activation's values that is zero."""

    def hook(_module: nn.Module, _inputs: Any, values: Tensor) -> None:  # what it returned would be the new output
        count.add_((values == 0).float().mean(-1).sum())

    return hook


@torch.no_grad()
def measure(model: Any, stream: Tensor, length: int) -> dict[str, Any]:
    """Mean loss over a token stream, in windows of `length`, and how the layers agree with the model.

    A layer's prediction is its state read through the final norm and the head; counted is how often the model's top
    token is the layer's top one, or among its top four; and which share of a layer's activated gates is zero.
    """
    inputs, targets = windows(stream, min(length, len(stream) - 1))
    nats, (top1, top4, zeros) = 0.0, torch.zeros(3, model.config.num_hidden_layers)
    hooks = [
        layer.mlp.act_fn.register_forward_hook(zero_counter(zeros[i])) for i, layer in enumerate(model.model.layers)
    ]
    for rows in torch.split(torch.arange(len(inputs)), 8):
        out = model(inputs[rows], output_hidden_states=True)
        nats += F.cross_entropy(out.logits.flatten(0, 1), targets[rows].flatten(), reduction="sum").item()
        own = [model.lm_head(model.model.norm(state)) for state in out.hidden_states[1:-1]] + [out.logits]
        hits = torch.stack([logits.topk(4).indices for logits in own]) == out.logits.argmax(-1, keepdim=True)
        top1 += hits[..., 0].sum((1, 2))
        top4 += hits.any(-1).sum((1, 2))
    for hook in hooks:
        hook.remove()
    shares = {"layer_top1": top1 / targets.numel(), "layer_top4": top4 / targets.numel()}
    shares["layer_zeros"] = zeros / targets.numel()
    rounded = {name: [round(share, 4) for share in found.tolist()] for name, found in shares.items()}
    return {"window": length, "tokens": targets.numel(), "nats_per_token": nats / targets.numel(), **rounded}


def evaluate(folder: Path, text: Path, settings: Settings) -> list[dict[str, Any]]:
    """Measure a model on the first characters of a text; the bytes of each separator are those of the end token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return evaluation(partial(measure, model), tokenizer, text, settings)


def train_and_export(texts: list[Path], output: Path, settings: Settings, compiled: bool) -> dict[str, Any]:
    """The whole way from texts to a model folder; returns what the run was."""
    output.mkdir(parents=True, exist_ok=True)
    kept, held_out = without_held_out(read_stories(texts, settings.separator), settings.holdout_every)
    tokenizer = train_tokenizer(kept, settings)
    settings = replace(settings, vocab_size=len(tokenizer))
    stories = training_stories(tokenizer, kept, settings)
    model = StoryModel(LlamaForCausalLM(model_config(settings, tokenizer)), settings.dropout, settings.seed)
    if compiled:  # by parts, so that the random choice of an exit costs no recompilation
        for layer in model.layers:
            layer.compile()
        model.loss = torch.compile(model.loss)  # type: ignore[method-assign]
    training = DemoRun(model, settings, output / "checkpoint.pt")
    seconds = training.run(stories, torch.cat(encode_stories(tokenizer, held_out)))
    export(model, tokenizer, output)
    training.checkpoint.unlink()
    return training.summary(stories, seconds)


def parse_arguments() -> tuple[argparse.Namespace, Settings]:
    """The command line: where things are, and a flag for every setting."""
    parser = argparse.ArgumentParser(description="Train the story-telling demonstration model.")
    parser.add_argument("--data", type=Path, help="folder with the training texts; without it nothing is trained")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--texts", nargs="+", default=["stories_a.txt", "stories_c.txt"], help="files to train on")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="text to measure the model on")
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
        compiled = not (arguments.no_compile or arguments.smoke)
        metrics["training"] = train_and_export(texts, arguments.output, settings, compiled)
    if arguments.evaluate:
        metrics["evaluation"] = evaluate(arguments.output, arguments.evaluate, settings)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
