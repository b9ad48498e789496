"""Train, export and measure the small story-telling model used for demonstrations and tests.

    python scripts/train_demo_model.py --data DIR --output DIR [--evaluate FILE]

DIR holds texts: stories, a ``<|endoftext|>`` line after each. Every step adds to the usual loss that of one random
earlier layer, read through the same final norm and head, so that the model can be left early. Started again, an
interrupted run continues. Without ``--data``, the model in the output folder is only measured. Figures are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from muon import make_optimizers
from stories import SEPARATOR, parse_settings, read_stories, without_held_out
from story_model import StoryModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Settings:
    """Everything that defines a run; each field is also a command-line flag."""

    seed: int = field(default=20, metadata={"help": "seed of everything random"})
    precision: str = field(default="bfloat16", metadata={"help": "of products in training: bfloat16 or float32"})
    threads: int = field(default=1, metadata={"help": "CPU threads"})
    vocab_size: int = field(default=2048, metadata={"help": "entries of the byte-level BPE vocabulary"})
    num_hidden_layers: int = field(default=12, metadata={"help": "transformer layers"})
    hidden_size: int = field(default=256, metadata={"help": "width of the residual stream"})
    intermediate_size: int = field(default=704, metadata={"help": "width of the feed-forward layers"})
    num_attention_heads: int = field(default=8, metadata={"help": "query heads"})
    num_key_value_heads: int = field(default=4, metadata={"help": "key and value heads"})
    hidden_act: str = field(default="silu", metadata={"help": "activation of the gate: silu or relu"})
    activity_weight: float = field(default=0.0, metadata={"help": "weight of the sum of layers' mean activated gates"})
    context: int = field(default=512, metadata={"help": "tokens in a training window"})
    batch: int = field(default=8, metadata={"help": "windows in a step"})
    steps: int = field(default=2100, metadata={"help": "optimiser steps"})
    warmup: int = field(default=60, metadata={"help": "steps of linear warm-up"})
    decay_share: float = field(default=0.6, metadata={"help": "last share of the steps, in which the rate falls to 0"})
    muon_rate: float = field(default=8e-3, metadata={"help": "peak learning rate of the hidden matrices (Muon)"})
    adam_rate: float = field(default=6e-3, metadata={"help": "peak learning rate of embedding and norms (AdamW)"})
    weight_decay: float = field(default=0.5, metadata={"help": "decoupled weight decay of the hidden matrices"})
    embed_decay: float = field(default=0.1, metadata={"help": "decoupled weight decay of the embedding"})
    dropout: float = field(default=0.15, metadata={"help": "dropout on what each sub-layer adds to the stream"})
    exit_weight: float = field(default=0.3, metadata={"help": "weight of the random earlier layer's loss"})
    first_exit: int = field(default=2, metadata={"help": "earliest layer (from 1) that gets a loss of its own"})
    holdout_every: int = field(default=80, metadata={"help": "every n-th story is kept for validation"})
    log_every: int = field(default=100, metadata={"help": "steps between validations"})
    begin: str = field(default="<s>", metadata={"help": "token before every story and every prompt"})
    end: str = field(default="</s>", metadata={"help": "token after every story"})
    separator: str = field(default=SEPARATOR, metadata={"help": "what separates the stories of a text"})
    evaluate_characters: int = field(default=600_000, metadata={"help": "length of the text that is evaluated on"})
    save_seconds: float = field(default=300.0, metadata={"help": "seconds between checkpoints"})

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


def encode_stories(tokenizer: Any, stories: list[str]) -> list[Tensor]:
    """Each story encoded as a prompt would be, with the end token after it."""
    rows = tokenizer(stories, verbose=False)["input_ids"]
    return [torch.tensor([*row, tokenizer.eos_token_id]) for row in rows]


def windows(stream: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Non-overlapping windows of a token stream: inputs, and targets one token ahead."""
    used = (len(stream) - 1) // length * length
    return stream[:used].view(-1, length), stream[1 : used + 1].view(-1, length)


def training_batches(stories: list[Tensor], settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches; every pass packs the stories in a new order from a new offset."""
    for epoch in itertools.count():
        shuffle = random.Random(f"{settings.seed}-{epoch}")
        order = shuffle.sample(range(len(stories)), len(stories))
        stream = torch.cat([stories[index] for index in order])[shuffle.randrange(settings.context) :]
        inputs, targets = windows(stream, settings.context)
        rows = torch.tensor(shuffle.sample(range(len(inputs)), len(inputs)))
        for chosen in torch.split(rows, settings.batch):
            if len(chosen) == settings.batch or len(rows) < settings.batch:
                yield inputs[chosen], targets[chosen]


def model_config(settings: Settings, tokenizer: Any) -> LlamaConfig:
    """The Hugging Face configuration of the model."""
    names = ["vocab_size", "hidden_size", "intermediate_size"]
    names += ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act"]
    shape = {name: getattr(settings, name) for name in names} | {"max_position_embeddings": settings.context}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return LlamaConfig(**shape, **ends, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=True)


class Training:
    """A training run that can be interrupted and continued."""

    def __init__(self, model: StoryModel, settings: Settings, checkpoint: Path) -> None:
        self.model, self.settings, self.checkpoint = model, settings, checkpoint
        self.precision = getattr(torch, settings.precision)
        rates, decays = (settings.muon_rate, settings.adam_rate), (settings.weight_decay, settings.embed_decay)
        self.optimizers = make_optimizers(model.llama.model, rates, decays, self.precision)
        self.done, self.seconds = 0, 0.0  # steps done, and the time of the parts of the run before this one

    def save(self, seconds: float) -> None:
        """Write the state of the run, whole or not at all."""
        state = {"settings": asdict(self.settings), "done": self.done, "seconds": self.seconds + seconds}
        state["model"] = self.model.llama.state_dict()
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(state, part := self.checkpoint.with_suffix(".part"))
        part.replace(self.checkpoint)

    def load(self) -> None:
        """Continue the run that the checkpoint holds."""
        state = torch.load(self.checkpoint, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"{self.checkpoint} belongs to a run with other settings; move it away to start again")
        self.done, self.seconds = state["done"], state["seconds"]
        self.model.llama.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """One update; returns the last layer's loss. What is random here depends on the step's number alone."""
        settings = self.settings
        fall = (settings.steps - self.done) / max(1, round(settings.steps * settings.decay_share))
        for optimizer, peak in zip(self.optimizers, (settings.muon_rate, settings.adam_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (self.done + 1) / settings.warmup, fall)
        torch.manual_seed(settings.seed * 1_000_003 + self.done)
        choice = random.Random(f"{settings.seed}-exit-{self.done}")
        early = choice.randrange(settings.first_exit, settings.num_hidden_layers)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == torch.bfloat16):
            states, activity = self.model.states(batch[0])
            final = self.model.loss(states[-1], batch[1])
            exiting = self.model.loss(states[early - 1], batch[1])
        torch.autograd.backward(final + settings.exit_weight * exiting + settings.activity_weight * activity)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.done += 1
        return final.item()

    def run(self, stories: list[Tensor], held_out: Tensor) -> float:
        """Train to the end; returns the seconds it took, over all parts of the run."""
        if self.checkpoint.exists():
            self.load()
        started = saved = time.monotonic()
        losses: list[float] = []
        for batch in itertools.islice(training_batches(stories, self.settings), self.done, self.settings.steps):
            losses.append(self.step(batch))
            if self.done % self.settings.log_every == 0:
                found = measure(self.model.llama, held_out, self.settings.context)
                zeros = sum(found["layer_zeros"]) / self.settings.num_hidden_layers
                metrics = f"train {sum(losses) / len(losses):.4f} held-out {found['nats_per_token']:.4f}"
                metrics += f" zero gates {zeros:.3f}"
                print(f"{self.seconds + time.monotonic() - started:.0f} s step {self.done} {metrics}", file=sys.stderr)
                losses.clear()
            if time.monotonic() - saved > self.settings.save_seconds or self.done == self.settings.steps:
                saved = time.monotonic()
                self.save(saved - started)
        return self.seconds + time.monotonic() - started


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
    content = text.read_text(encoding="utf-8").replace(settings.separator, settings.end)[: settings.evaluate_characters]
    stream = torch.cat(encode_stories(tokenizer, [piece.strip() for piece in content.split(settings.end)]))
    results = [measure(model, stream, length) for length in (settings.context // 2, settings.context)]
    bits_per_nat_a_token = len(stream) / len(content.encode()) / math.log(2)
    return [result | {"bits_per_byte": round(result["nats_per_token"] * bits_per_nat_a_token, 4)} for result in results]


def train_and_export(texts: list[Path], output: Path, settings: Settings, compiled: bool) -> dict[str, Any]:
    """The whole way from texts to a model folder; returns what the run was."""
    output.mkdir(parents=True, exist_ok=True)
    kept, held_out = without_held_out(read_stories(texts, settings.separator), settings.holdout_every)
    tokenizer = train_tokenizer(kept, settings)
    settings = replace(settings, vocab_size=len(tokenizer))
    stories = encode_stories(tokenizer, kept)
    if sum(len(story) for story in stories) < 2 * settings.context + 1:  # a window is left after the largest offset
        raise SystemExit("the texts are too short for one training window")
    model = StoryModel(LlamaForCausalLM(model_config(settings, tokenizer)), settings.dropout, settings.seed)
    if compiled:  # by parts, so that the random choice of an exit costs no recompilation
        for layer in model.layers:
            layer.compile()
        model.loss = torch.compile(model.loss)  # type: ignore[method-assign]
    training = Training(model, settings, output / "checkpoint.pt")
    seconds = training.run(stories, torch.cat(encode_stories(tokenizer, held_out)))
    export(model, tokenizer, output)
    training.checkpoint.unlink()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training_tokens": sum(len(story) for story in stories),
        "tokens_seen": settings.steps * settings.batch * settings.context,
        "seconds": round(seconds),
        "settings": asdict(settings),
    }


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
