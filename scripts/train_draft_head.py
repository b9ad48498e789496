"""Train a draft head for a local model, in the style of EAGLE-1 or EAGLE-3.

    python scripts/train_draft_head.py --model MODEL --texts FILE... --output DIR [--evaluate FILE...] [--start HEAD]
        [--eagle 3] [--replies N] [--traces FILE]

A head of EAGLE-1 (arXiv 2401.15077) sees the newest token and the model's final normed state that led to it, and
guesses the next such state; the model's own head turns it into a token. One of EAGLE-3 (arXiv 2503.01840) sees the
states before three of the model's layers, learns the tokens alone, and drafts the most frequent ones.
Both learn from the states that this engine's model computes, over texts, over its own continuations of their
beginnings, and, for a chat model, over its own replies to prompts of five kinds (draft_prompts.py). Later guesses of a
chain start from guessed states, so the later steps of training unroll the head over its own guesses (arXiv 2408.15766;
EAGLE-3's training-time test). Figures are printed, and the head is saved every few minutes. All states are kept in
memory, and in the file --traces for the next run: 2 bytes x hidden size a token, with EAGLE-3 four times that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from draft_head_module import TrainingHead
from draft_head_teacher import Teacher, Trace
from draft_prompts import KINDS, PromptSource, read_passages
from draft_vocabulary import frequent_tokens, written
from eagle3_module import Eagle3TrainingHead
from measure_draft_head import Size, measure
from safetensors.torch import load_file, save_file
from stories import SEPARATOR, parse_settings, without_held_out
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hetero_ee import Engine, SamplingParams
from hetero_ee.hub.resolve import resolve_model
from hetero_ee.speculation.sources.draft_head_file import DRAFT_TOKEN_IDS, read_draft_head
from hetero_ee.speculation.sources.eagle3 import LAYER_IDS, default_layers

Batch = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # token_ids (b, n), a Trace's states and seen, whether a row is learned (b, n)
CONTINUED_TOGETHER = 64
Data = dict[str, list[Trace]]  # "traces" to learn from, and "watched" ones, which are held out
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
    replies: int = field(default=0, metadata={"help": "tokens of replies to prompts of five kinds, about"})
    reply: int = field(default=128, metadata={"help": "longest reply, in tokens"})
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
    save_seconds: float = field(default=300.0, metadata={"help": "seconds between two saves of the head"})
    separator: str = field(default=SEPARATOR, metadata={"help": "what separates the texts of a file"})

    def smoke(self) -> Settings:
        """A run of seconds, to test the path from texts to a head."""
        tiny = replace(self, tokens=1500, generated=400, window=48, batch=256, epochs=2.0, held_out=4)
        return replace(tiny, watched=200, log_every=5)


class Tokens(NamedTuple):
    """Numbers of tokens of each origin."""

    texts: int
    continuations: int
    replies: int


def progress(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def collect(teacher: Teacher, passages: Sequence[str], settings: Settings, n_tokens: Tokens, name: str) -> list[Trace]:
    """Return traces of about these numbers of tokens: of texts, of continuations of their beginnings, of replies."""
    texts = [teacher.encoded(text, settings.window) for text in passages[: 1 + n_tokens.texts // 16]]
    beginnings = [tokens[: settings.beginning] for tokens in texts]
    source = PromptSource(passages, settings.seed, held_out=name == "held-out")
    prompts = (teacher.replied(source.prompt(kind)) for kind in itertools.cycle(KINDS))
    new_tokens = settings.window - settings.beginning
    n_beginnings = math.ceil(n_tokens.continuations / new_tokens)
    n_prompts = math.ceil(n_tokens.replies / settings.reply)  # at least: many replies end earlier
    return [
        *up_to(n_tokens.texts, map(teacher.trace, texts), f"{name} texts"),
        *up_to(
            n_tokens.continuations,
            continued(teacher, beginnings, new_tokens, settings, n_beginnings),
            f"{name} continuations",
        ),
        *up_to(n_tokens.replies, continued(teacher, prompts, settings.reply, settings, n_prompts), f"{name} replies"),
    ]


def continued(
    teacher: Teacher, prompts: Iterable[list[int]], n_tokens: int, settings: Settings, n: int
) -> Iterator[Trace]:
    """Yield traces of prompts, about n, with the model's continuations, every other one sampled."""
    params = [
        SamplingParams(temperature=temperature, seed=settings.seed) for temperature in (0.0, settings.temperature)
    ]
    return (trace for _, trace in teacher.continued(prompts, n_tokens, params, max(1, min(CONTINUED_TOGETHER, n))))


def up_to(n_tokens: int, traces: Iterator[Trace], name: str) -> list[Trace]:
    """Return the first traces, until those tokens that are learned from are `n_tokens`."""
    found, n_found = list[Trace](), 0
    while n_found < n_tokens and (trace := next(traces, None)) is not None:
        found.append(trace)
        n_found += trace.n_learned
        if len(found) % 50 == 0:
            progress(f"{name}: {n_found} of {n_tokens} tokens")
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
    lengths, firsts = (torch.tensor(each) for each in zip(*((len(t.token_ids), t.first) for t in traces), strict=True))
    places = torch.arange(tokens.shape[1])
    return tokens, states, seen, (places >= firsts[:, None]) & (places < lengths[:, None])


def losses(head: TrainingHead, teacher: Teacher, batch: Batch, chain: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """The loss of one step, and the share of right first tokens at each guess of a chain (chain,)."""
    tokens, states, seen, mask = batch
    inputs, rows = head.embedding[tokens[:, 1:]], teacher.head if head.rows is None else head.rows
    targets, counted = states[:, 1:], mask[:, 1:]
    with torch.no_grad():
        likely = F.linear(targets[counted], rows).float().softmax(-1)
        best = likely.argmax(-1)
    total, right = torch.zeros(()), []
    for guessed in head.unrolled(inputs, seen[:, :-1], chain):
        guesses = guessed[counted]
        logits = head.scores(guesses, teacher.head).float()
        total = total + settings.token_weight * F.cross_entropy(logits, likely)
        if settings.eagle == 1:
            total = total + settings.state_weight * F.smooth_l1_loss(guesses.float(), targets[counted])
        right.append((logits.argmax(-1) == best).float().mean())
    return total / chain, torch.stack(right)


def train(head: TrainingHead, teacher: Teacher, data: Data, settings: Settings, keep: Callable[[int], None]) -> int:
    """Train until the passes are done or the time is up, and `keep` the head now and then. Return the steps done."""
    traces = data["traces"]
    n_steps = math.ceil(settings.epochs * sum(len(trace.token_ids) for trace in traces) / settings.batch)
    kept_s = time.monotonic()
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
            metrics = f"train {_shares(recent)} held-out {_shares(_held_out(head, teacher, data['watched'], settings))}"
            progress(f"step {step} of {n_steps} loss {loss.item():.4f} right {metrics}")
            recent.clear()
        if time.monotonic() - kept_s > settings.save_seconds or share >= 1:
            keep(step)
            kept_s = time.monotonic()
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
    layers = {LAYER_IDS: list(captured), "fc_norm": True} if captured else {}
    return {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1} | layers | config


def save(
    head: TrainingHead, teacher: Teacher, model: Path, output: Path, metrics: dict[str, Any], token_ids: Any
) -> None:
    """Writes the head in fp16, and reads it as the engine does. token_ids: those that it is to draft, None for all."""
    output.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors(torch.float16), output / "model.safetensors")
    config = head_config(model, teacher.executor.capturing) | {"torch_dtype": "float16", "training": metrics}
    if token_ids is not None:
        config[DRAFT_TOKEN_IDS] = token_ids
    (output / "config.json").write_text(written(config))
    read_draft_head(output, teacher.spec)


def new_head(teacher: Teacher, token_ids: list[int] | None, traces: Sequence[Trace]) -> TrainingHead:
    """Return an untrained head. token_ids: those that an EAGLE-3 head drafts, None for all."""
    embedding = teacher.embedding.clone()
    if not teacher.executor.capturing:
        return TrainingHead(teacher.spec, embedding)
    rows = teacher.head if token_ids is None else teacher.head[token_ids]
    head = Eagle3TrainingHead(teacher.spec, embedding, len(teacher.executor.capturing), rows, token_ids)
    last = torch.cat([trace.captured[-1][trace.first :] for trace in traces[:64]]).float()
    head.begin_with(teacher.last_ffn(), teacher.final_scale(), float(last.pow(2).mean(-1).sqrt().median()))
    return head


def run(given: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Go the whole way from texts to a head, and return the metrics of the run. given: see parse_arguments."""
    torch.manual_seed(settings.seed)
    model = resolve_model(given.model)
    with Engine.from_pretrained(model, threads=settings.threads, profile="off") as engine, torch.no_grad():
        torch.set_num_threads(settings.threads)
        teacher = Teacher(engine)
        if settings.eagle == 3:
            teacher.executor.capture(default_layers(teacher.spec.n_layers))
        if not (teacher.spec.gated and teacher.spec.rope and teacher.spec.norm == "rms"):
            raise SystemExit(f"{model}: a draft head needs rotary positions, RMSNorm and a gated FFN.")
        data = learned_data(teacher, given, settings)
    traces, started = data["traces"], time.monotonic()
    learned = (trace.token_ids[trace.first :].tolist() for trace in traces)
    token_ids = frequent_tokens(learned, settings.coverage, teacher.spec.vocab_size)
    head = new_head(teacher, token_ids, traces)
    metrics = {
        "model": given.model.resolve().name,
        "quantizer": teacher.quantizer,
        "texts": [text.name for text in given.texts],
        "sequences": len(traces),
        "tokens": sum(trace.n_learned for trace in traces),
        "settings": asdict(settings),
    }
    if given.start is not None:
        head.load_tensors(load_file(given.start / "model.safetensors"))
        metrics["start"] = json.loads((given.start / "config.json").read_text()).get("training")

    def keep(n_steps: int) -> None:
        metrics.update(steps=n_steps, seconds=round(time.monotonic() - started))
        save(head, teacher, model, given.output, metrics, token_ids)

    train(head, teacher, data, settings, keep)
    return metrics


def learned_data(teacher: Teacher, given: argparse.Namespace, settings: Settings) -> Data:
    """Return the traces to learn from and those to watch, from the file --traces if it exists, else computed."""
    if given.traces is not None and given.traces.exists():
        kept = torch.load(given.traces, weights_only=True)
        return {name: [Trace(*fields) for fields in traces] for name, traces in kept.items()}
    passages, held_out = without_held_out(read_passages(given.texts, settings.separator), settings.held_out)
    random.Random(settings.seed).shuffle(passages)
    shares = (settings.tokens, settings.generated, settings.replies)
    few = (settings.watched * bool(each) for each in shares)
    found = {
        "watched": collect(teacher, held_out, settings, Tokens(*few), "held-out"),
        "traces": collect(teacher, passages, settings, Tokens(*shares), "training"),
    }
    if given.traces is not None:
        torch.save({name: [(*vars(each).values(),) for each in traces] for name, traces in found.items()}, given.traces)
    return found


def parse_arguments() -> tuple[argparse.Namespace, Settings]:
    """The command line: where things are, and a flag for every setting."""
    parser = argparse.ArgumentParser(description="Train a draft head for a local model.")
    parser.add_argument("--model", type=Path, required=True, help="folder or GGUF file of the model")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="files to learn from")
    parser.add_argument("--output", type=Path, required=True, help="folder for the head")
    parser.add_argument("--evaluate", type=Path, nargs="+", metavar="FILE", help="texts to measure the head on")
    parser.add_argument("--start", type=Path, metavar="HEAD", help="folder of a head to start from")
    parser.add_argument("--traces", type=Path, metavar="FILE", help="keep the states here, or take those kept here")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few tokens")
    return parse_settings(parser, Settings)


def main() -> None:
    """Trains, and evaluates if there is a text to evaluate on."""
    arguments, settings = parse_arguments()
    metrics: dict[str, Any] = {"training": run(arguments, settings)}
    if arguments.evaluate:
        size = Size(prompts=4, new_tokens=16) if arguments.smoke else Size()
        size, temperatures = replace(size, is_chat=settings.replies > 0), (0.0, settings.temperature)
        model, head = arguments.model, arguments.output
        metrics["acceptance"] = measure(model, head, arguments.evaluate, size, temperatures, settings.threads)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
