"""Train a draft head for a local model, in the style of EAGLE-1 or EAGLE-3.

    python scripts/train_draft_head.py --model DIR --texts FILE... --output DIR [--evaluate FILE] [--start HEAD]
        [--eagle 3]

A head of EAGLE-1 (arXiv 2401.15077) sees the newest token and the model's final normed state that led to it, and
guesses the next such state; the model's own head turns it into a token. One of EAGLE-3 (arXiv 2503.01840) sees the
states before three of the model's layers, learns the tokens alone, and has a head of its own for its draft vocabulary.
Both learn from the states that this engine's int4 model computes, over texts and over its own continuations of their
beginnings. Later guesses of a chain start from guessed states, so the later steps of training unroll the head over its
own guesses (arXiv 2408.15766; EAGLE-3's training-time test). Figures are printed. All states are kept in memory,
2 bytes x hidden size a token, with EAGLE-3 four times that.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from draft_head_module import TrainingHead
from draft_head_teacher import Teacher, Trace
from draft_vocabulary import frequent_tokens, written
from eagle3_module import Eagle3TrainingHead
from measure_draft_head import Size, measure
from safetensors.torch import load_file, save_file
from stories import SEPARATOR, parse_settings, read_stories, without_held_out
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hetero_ee import Engine, SamplingParams
from hetero_ee.speculation.sources.draft_head_file import DRAFT_TOKEN_IDS, read_draft_head
from hetero_ee.speculation.sources.eagle3 import DRAFT_VOCABULARY, LAYER_IDS, default_layers

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # token_ids (b, n), of a Trace states and seen, which are there (b, n)
CONTINUED_TOGETHER = 64
COPIED_FIELDS = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
COPIED_FIELDS += ["head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings"]
COPIED_FIELDS += ["rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"]


@dataclass(frozen=True)
class Settings:
    """Everything that defines a run; each field is also a command-line flag."""

    eagle: int = field(default=1, metadata={"help": "1, or 3 for a head of three captured layers"})
    seed: int = field(default=8, metadata={"help": "seed of everything random"})
    threads: int = field(default=1, metadata={"help": "CPU threads"})
    tokens: int = field(default=1_000_000, metadata={"help": "tokens of text to learn from, about"})
    generated: int = field(default=200_000, metadata={"help": "tokens of continuations to learn from, about"})
    temperature: float = field(default=0.8, metadata={"help": "of every other continuation; the rest are greedy"})
    beginning: int = field(default=12, metadata={"help": "tokens of a text that are continued"})
    window: int = field(default=320, metadata={"help": "longest sequence, in tokens"})
    batch: int = field(default=2048, metadata={"help": "tokens in a step"})
    epochs: float = field(default=6.0, metadata={"help": "passes over the states, at most"})
    seconds: float = field(default=3600.0, metadata={"help": "time limit of the steps; the rate falls with it"})
    rate: float = field(default=3e-3, metadata={"help": "peak learning rate (Adam)"})
    warmup: float = field(default=0.02, metadata={"help": "share of the steps in which the rate rises"})
    alone: float = field(default=0.5, metadata={"help": "first share of the run, in which a step is one guess"})
    chain: int = field(default=3, metadata={"help": "guesses that a step unrolls from then on"})
    state_weight: float = field(default=1.0, metadata={"help": "weight of the states' loss (smooth L1)"})
    token_weight: float = field(default=1.0, metadata={"help": "weight of the tokens' loss (EAGLE: 0.1)"})
    coverage: float = field(default=0.99, metadata={"help": "share of what it learns from in its draft vocabulary"})
    held_out: int = field(default=80, metadata={"help": "every n-th text is kept to watch the training"})
    watched: int = field(default=5000, metadata={"help": "tokens of each kind that the training is watched on"})
    log_every: int = field(default=200, metadata={"help": "steps between two lines of progress"})
    separator: str = field(default=SEPARATOR, metadata={"help": "what separates the texts of a file"})

    def smoke(self) -> Settings:
        """A run of seconds, to test the path from texts to a head."""
        tiny = replace(self, tokens=1500, generated=400, window=48, batch=256, epochs=2.0, held_out=4)
        return replace(tiny, watched=200, log_every=5)


def progress(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def collect(teacher: Teacher, texts: Sequence[str], settings: Settings, n_text: int, n_generated: int) -> list[Trace]:
    """Traces of about n_text tokens of the texts, and of about n_generated of continuations."""
    token_lists: list[list[int]] = []
    for text in texts:
        if n_text <= 0:
            break
        token_lists.append(teacher.encoded(text, settings.window))
        n_text -= len(token_lists[-1])
    token_lists += continuations(teacher, token_lists, settings, n_generated)
    traces = []
    for number, tokens in enumerate(token_lists):
        traces.append(teacher.trace(tokens).half())
        if number % 500 == 0:
            progress(f"states of {number} of {len(token_lists)} sequences")
    return traces


def continuations(teacher: Teacher, texts: list[list[int]], settings: Settings, n_tokens: int) -> list[list[int]]:
    """Return continuations of the texts' beginnings, every other one sampled, until there are `n_tokens`."""
    params = [SamplingParams(temperature=temperature) for temperature in (0.0, settings.temperature)]
    found: list[list[int]] = []
    for first in range(0, len(texts), CONTINUED_TOGETHER):
        if n_tokens <= 0:
            break
        beginnings = [tokens[: settings.beginning] for tokens in texts[first : first + CONTINUED_TOGETHER]]
        whole = teacher.continued(beginnings, settings.window - settings.beginning, params)
        found += whole
        n_tokens -= sum(map(len, whole))
        progress(f"{sum(map(len, found))} tokens generated")
    return found


def batches(traces: Sequence[Trace], settings: Settings) -> Iterator[Batch]:
    """Endless: sequences of about one length together, in a new order at each pass."""
    shuffle = random.Random(settings.seed)
    while True:
        order = sorted(range(len(traces)), key=lambda index: len(traces[index].token_ids) + shuffle.random() * 16)
        groups: list[list[Trace]] = [[]]
        for index in order:
            trace = traces[index]
            if groups[-1] and (len(groups[-1]) + 1) * len(trace.token_ids) > settings.batch:
                groups.append([])
            groups[-1].append(trace)
        shuffle.shuffle(groups)
        for group in groups:
            yield padded(group)


def padded(traces: Sequence[Trace]) -> Batch:
    tokens = pad_sequence([trace.token_ids for trace in traces], batch_first=True)
    states = pad_sequence([trace.states for trace in traces], batch_first=True).float()
    seen = pad_sequence([trace.seen for trace in traces], batch_first=True).float()
    lengths = torch.tensor([len(trace.token_ids) for trace in traces])
    return tokens, states, seen, torch.arange(tokens.shape[1]) < lengths[:, None]


def losses(head: TrainingHead, teacher: Teacher, batch: Batch, chain: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """The loss of one step, and the share of right first tokens at each guess of a chain (chain,)."""
    tokens, states, seen, mask = batch
    inputs = head.embedding[tokens[:, 1:]]
    targets, counted = states[:, 1:], mask[:, 1:]
    with torch.no_grad():
        wanted = F.linear(targets[counted], teacher.head)
        best = wanted.argmax(-1)
        likely = (wanted if head.token_ids is None else wanted[:, head.token_ids]).softmax(-1)
    total, right = torch.zeros(()), []
    for guessed in head.unrolled(inputs, seen[:, :-1], chain):
        guesses = guessed[counted]
        logits = head.scores(guesses, teacher.head).float()
        total = total + settings.token_weight * F.cross_entropy(logits, likely)
        if settings.eagle == 1:
            total = total + settings.state_weight * F.smooth_l1_loss(guesses.float(), targets[counted])
        chosen = logits.argmax(-1)
        right.append(((chosen if head.token_ids is None else head.token_ids[chosen]) == best).float().mean())
    return total / chain, torch.stack(right)


def train(head: TrainingHead, teacher: Teacher, traces: list[Trace], watched: list[Trace], settings: Settings) -> int:
    """Trains until the passes are done or the time is up; returns the number of steps."""
    n_steps = math.ceil(settings.epochs * sum(len(trace.token_ids) for trace in traces) / settings.batch)
    optimizer = torch.optim.Adam(head.parameters(), lr=settings.rate, betas=(0.9, 0.95))
    started = time.monotonic()
    recent: list[Tensor] = []
    step, share = 0, 0.0
    for batch in batches(traces, settings):
        step += 1
        share = max(step / n_steps, (time.monotonic() - started) / settings.seconds)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * min(1.0, step / (settings.warmup * n_steps + 1), max(0.0, 1 - share))
        chain = 1 if share < settings.alone else settings.chain
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, right = losses(head, teacher, batch, chain, settings)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(right[:1])
        if step % settings.log_every == 0 or share >= 1:
            metrics = f"train {_shares(recent)} held-out {_shares(_held_out(head, teacher, watched, settings))}"
            progress(f"step {step} of {n_steps} loss {loss.item():.4f} right {metrics}")
            recent.clear()
        if share >= 1:
            break
    return step


@torch.no_grad()
def _held_out(head: TrainingHead, teacher: Teacher, watched: list[Trace], settings: Settings) -> list[Tensor]:
    """Shares of right tokens at each guess of a chain, of some sequences together at a time."""
    parts = [watched[first : first + 8] for first in range(0, len(watched), 8)]
    return [losses(head, teacher, padded(part), settings.chain, settings)[1] for part in parts]


def _shares(found: Sequence[Tensor]) -> str:
    return "/".join(f"{share:.3f}" for share in torch.stack(list(found)).mean(0).tolist())


def head_config(model: Path, captured: Sequence[int]) -> dict[str, Any]:
    """config.json of the head: one Llama layer in the model's shape."""
    values = json.loads((model / "config.json").read_text())
    config = {name: values[name] for name in COPIED_FIELDS if values.get(name) is not None}
    architecture = "Eagle3LlamaForCausalLM" if captured else "LlamaForCausalLM"
    layers = {LAYER_IDS: list(captured)} if captured else {}
    return {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1} | layers | config


def save(
    head: TrainingHead, teacher: Teacher, model: Path, output: Path, metrics: dict[str, Any], token_ids: Any
) -> None:
    """Writes the head in fp16, and reads it as the engine does. token_ids: those that it is to draft, None for all."""
    output.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors(torch.float16), output / "model.safetensors")
    config = head_config(model, teacher.executor.capturing) | {"torch_dtype": "float16", "training": metrics}
    if token_ids is not None:
        config |= {DRAFT_VOCABULARY: len(token_ids)} if teacher.executor.capturing else {DRAFT_TOKEN_IDS: token_ids}
    (output / "config.json").write_text(written(config))
    read_draft_head(output, teacher.spec)


def new_head(teacher: Teacher, token_ids: list[int] | None) -> TrainingHead:
    """One that knows nothing. token_ids: those that an EAGLE-3 head drafts, None for all."""
    embedding = teacher.embedding.clone()
    if not teacher.executor.capturing:
        return TrainingHead(teacher.spec, embedding)
    rows = teacher.head if token_ids is None else teacher.head[token_ids]
    return Eagle3TrainingHead(teacher.spec, embedding, len(teacher.executor.capturing), rows, token_ids)


def run(model: Path, texts: list[Path], output: Path, settings: Settings, start: Path | None = None) -> dict[str, Any]:
    """The whole way from texts to a head; returns what the run was. start: a head to start from."""
    torch.manual_seed(settings.seed)
    kept, held_out = without_held_out(read_stories(texts, settings.separator), settings.held_out)
    random.Random(settings.seed).shuffle(kept)
    with Engine.from_pretrained(model, threads=settings.threads, profile="off") as engine:
        torch.set_num_threads(settings.threads)
        teacher = Teacher(engine, model)
        if settings.eagle == 3:
            teacher.executor.capture(default_layers(teacher.spec.n_layers))
        if not (teacher.spec.gated and teacher.spec.rope and teacher.spec.norm == "rms"):
            raise SystemExit(f"{model}: a draft head needs rotary positions, RMSNorm and a gated FFN.")
        with torch.inference_mode():
            watched = collect(teacher, held_out, settings, settings.watched, settings.watched)
            traces = collect(teacher, kept, settings, settings.tokens, settings.generated)
    learned = (trace.token_ids.tolist() for trace in traces)
    token_ids = frequent_tokens(learned, settings.coverage, teacher.spec.vocab_size)
    head = new_head(teacher, token_ids)
    if start is not None:
        head.load_tensors(load_file(start / "model.safetensors"))
    started = time.monotonic()
    n_steps = train(head, teacher, traces, watched, settings)
    metrics = {
        "model": model.resolve().name,
        "quantizer": teacher.quantizer,
        "texts": [text.name for text in texts],
        "sequences": len(traces),
        "tokens": sum(len(trace.token_ids) for trace in traces),
        "steps": n_steps,
        "seconds": round(time.monotonic() - started),
        "settings": asdict(settings),
    }
    if start is not None:
        metrics["start"] = json.loads((start / "config.json").read_text()).get("training")
    save(head, teacher, model, output, metrics, token_ids)
    return metrics


def parse_arguments() -> tuple[argparse.Namespace, Settings]:
    """The command line: where things are, and a flag for every setting."""
    parser = argparse.ArgumentParser(description="Train a draft head for a local model.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, or a store")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="files to learn from")
    parser.add_argument("--output", type=Path, required=True, help="folder for the head")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="texts to measure the head on")
    parser.add_argument("--start", type=Path, metavar="HEAD", help="folder of a head to start from")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few tokens")
    return parse_settings(parser, Settings)


def main() -> None:
    """Trains, and evaluates if there is a text to evaluate on."""
    arguments, settings = parse_arguments()
    metrics: dict[str, Any] = {
        "training": run(arguments.model, arguments.texts, arguments.output, settings, arguments.start)
    }
    if arguments.evaluate:
        size, temperatures = Size(prompts=4, new_tokens=16) if arguments.smoke else Size(), (0.0, settings.temperature)
        model, head = arguments.model, arguments.output
        metrics["acceptance"] = measure(model, head, arguments.evaluate, size, temperatures, settings.threads)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
