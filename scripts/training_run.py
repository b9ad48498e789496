"""Train small story-telling models in runs that can be interrupted: their settings, batches and checkpoints."""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from stories import SEPARATOR
from torch import Tensor, nn


@dataclass(frozen=True)
class RunSettings:
    """Settings of every run; each field is also a command-line flag."""

    seed: int = field(default=20, metadata={"help": "seed of everything random"})
    precision: str = field(default="bfloat16", metadata={"help": "of products in training: bfloat16 or float32"})
    threads: int = field(default=1, metadata={"help": "CPU threads"})
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
    holdout_every: int = field(default=80, metadata={"help": "every n-th story is kept for validation"})
    log_every: int = field(default=100, metadata={"help": "steps between validations"})
    separator: str = field(default=SEPARATOR, metadata={"help": "what separates the stories of a text"})
    evaluate_characters: int = field(default=600_000, metadata={"help": "length of the text that is evaluated on"})
    save_seconds: float = field(default=300.0, metadata={"help": "seconds between checkpoints"})


def encode_stories(tokenizer: Any, stories: list[str]) -> list[Tensor]:
    """Each story encoded as a prompt would be, with the end token after it."""
    rows = tokenizer(stories, verbose=False)["input_ids"]
    return [torch.tensor([*row, tokenizer.eos_token_id]) for row in rows]


def windows(stream: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Non-overlapping windows of a token stream: inputs, and targets one token ahead."""
    used = (len(stream) - 1) // length * length
    return stream[:used].view(-1, length), stream[1 : used + 1].view(-1, length)


def training_batches(stories: list[Tensor], settings: RunSettings) -> Iterator[tuple[Tensor, Tensor]]:
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


def read_checkpoint(file: Path) -> dict[str, Any]:
    """Return the state of a run as TrainingRun.save wrote it."""
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def training_stories(tokenizer: Any, kept: list[str], settings: RunSettings) -> list[Tensor]:
    """The encoded stories, if they fill at least one training window; else the end of the program."""
    stories = encode_stories(tokenizer, kept)
    if sum(len(story) for story in stories) < 2 * settings.context + 1:  # a window is left after the largest offset
        raise SystemExit("the texts are too short for one training window")
    return stories


def evaluation(
    measured: Callable[[Tensor, int], dict[str, Any]], tokenizer: Any, text: Path, settings: RunSettings
) -> list[dict[str, Any]]:
    """Measure a model on the first characters of a text; the bytes of each separator are those of the end token.

    Args:
        measured: returns the figures of a token stream in windows of a length, with "nats_per_token" among them.
    """
    end = tokenizer.eos_token
    content = text.read_text(encoding="utf-8").replace(settings.separator, end)[: settings.evaluate_characters]
    stream = torch.cat(encode_stories(tokenizer, [piece.strip() for piece in content.split(end)]))
    bits_per_nat_a_token = len(stream) / len(content.encode()) / math.log(2)
    results = [measured(stream, length) for length in (settings.context // 2, settings.context)]
    for result in results:
        nats = result["nats_per_token"]
        result["bits_per_byte"] = round((nats[0] if isinstance(nats, list) else nats) * bits_per_nat_a_token, 4)
    return results


class TrainingRun:
    """A run that can be interrupted and continued; subclasses define its losses and how it is validated."""

    def __init__(
        self, weights: nn.Module, optimizers: list[torch.optim.Optimizer], settings: RunSettings, checkpoint: Path
    ) -> None:
        self.weights, self.optimizers, self.settings, self.checkpoint = weights, optimizers, settings, checkpoint
        self.done, self.seconds = 0, 0.0  # steps done, and the time of the parts of the run before this one

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        """Return the loss to minimize, and the next token's share of it, which is printed."""
        raise NotImplementedError

    def validate(self, held_out: Tensor) -> str:
        """Return a line that says how well the model predicts the held-out tokens."""
        raise NotImplementedError

    def save(self, seconds: float) -> None:
        """Write the state of the run, whole or not at all."""
        state = {"settings": asdict(self.settings), "done": self.done, "seconds": self.seconds + seconds}
        state["model"] = self.weights.state_dict()
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(state, part := self.checkpoint.with_suffix(".part"))
        part.replace(self.checkpoint)

    def load(self) -> None:
        """Continue the run that the checkpoint holds; only the number of steps may have changed."""
        state = read_checkpoint(self.checkpoint)
        if state["settings"] | {"steps": self.settings.steps} != asdict(self.settings):
            raise SystemExit(f"{self.checkpoint} belongs to a run with other settings; move it away to start again")
        self.done, self.seconds = state["done"], state["seconds"]
        self.weights.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """One update; returns the next token's loss. What is random here depends on the step's number alone."""
        settings = self.settings
        fall = (settings.steps - self.done) / max(1, round(settings.steps * settings.decay_share))
        for optimizer, peak in zip(self.optimizers, (settings.muon_rate, settings.adam_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (self.done + 1) / settings.warmup, fall)
        torch.manual_seed(settings.seed * 1_000_003 + self.done)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.precision == "bfloat16"):
            total, final = self.losses(batch)
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(self.weights.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.done += 1
        return final

    def run(self, stories: list[Tensor], held_out: Tensor) -> float:
        """Train to the end; returns the seconds it took, over all parts of the run."""
        if self.checkpoint.exists():
            self.load()
        started = saved = time.monotonic()
        losses: list[float] = []
        for batch in itertools.islice(training_batches(stories, self.settings), self.done, self.settings.steps):
            losses.append(self.step(batch))
            if self.done % self.settings.log_every == 0:
                metrics = f"train {sum(losses) / len(losses):.4f} {self.validate(held_out)}"
                print(f"{self.seconds + time.monotonic() - started:.0f} s step {self.done} {metrics}", file=sys.stderr)
                losses.clear()
            if time.monotonic() - saved > self.settings.save_seconds or self.done == self.settings.steps:
                self.save((saved := time.monotonic()) - started)
        return self.seconds + time.monotonic() - started

    def summary(self, stories: list[Tensor], seconds: float) -> dict[str, Any]:
        """Return what a finished run was, as its script prints it."""
        settings = self.settings
        return {
            "parameters": sum(parameter.numel() for parameter in self.weights.parameters()),
            "training_tokens": sum(len(story) for story in stories),
            "tokens_seen": settings.steps * settings.batch * settings.context,
            "seconds": round(seconds),
            "settings": asdict(settings),
        }
