"""Measure how many of a draft head's tokens its model accepts.

    python scripts/measure_draft_head.py --model MODEL --head DIR --text FILE... [--chat]

The model continues the beginnings of the texts; with --chat it replies to held-out prompts of five kinds, by its chat
template, and each kind has its own figures. At every token of that, the head drafts a sequence as it does in exact
mode, int4 and all, and its drafts are checked against what the model says: at position j of a sequence, the share of
drafts that are right among those whose predecessors are. Greedy, and sampled with the noise that both sides share.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draft_head_teacher import Teacher
from draft_prompts import KINDS, PromptSource, read_passages

from hetero_ee import Engine, SamplingParams
from hetero_ee.decoding.requests import Ending, Request
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.head_check import accepted
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.source import Choose

SEED = 2  # of the prompts


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    prompts: int = 40  # texts that are continued, or prompts of each kind
    prompt_tokens: int = 16  # of a text, before that
    new_tokens: int = 128  # after that, at most
    draft_length: int = 4
    is_chat: bool = False


def acceptance(
    teacher: Teacher, source: DraftHeadSource, prompts: Sequence[list[int]], size: Size, params: SamplingParams
) -> dict[str, Any]:
    """Return the metrics of one way to sample."""
    right, tried = torch.zeros(size.draft_length), torch.zeros(size.draft_length)
    drafting_s = 0.0
    for number, trace in teacher.continued(prompts, size.new_tokens, [params]):
        tokens, states = trace.token_ids.tolist(), [each.float() for each in (trace.states, *trace.captured)]
        choose, started = _choice(teacher.executor, params, number, tokens), time.perf_counter()
        found = accepted(source, choose, tokens, states, trace.first, size.draft_length, number)
        drafting_s += time.perf_counter() - started
        right, tried = right + found[0], tried + found[1]
    n_chains, n_accepted = int(tried[0]), int(right.sum())
    return {
        "chains": n_chains,
        "acceptance_by_position": [round(share, 4) for share in (right / tried).tolist()],
        "tokens_a_pass": round(1 + n_accepted / n_chains, 3),
        "drafting_ms_a_token": round(1e3 * drafting_s / (n_chains * size.draft_length), 3),
    }


def _choice(executor: Executor, params: SamplingParams, number: int, tokens: Sequence[int]) -> Choose:
    """Return the function that chooses the drafts of this request."""
    text = Request.of_prompt(number, list(tokens), params, Ending(frozenset(), len(tokens)), str, kv_sequence=number)
    sampler = DraftSampler()
    return lambda hidden, end, history: sampler.drafted(executor, hidden, end, [(text, history)])[0]


@torch.inference_mode()
def measure(
    model: Path, head: Path, texts: Sequence[Path], size: Size, temperatures: Sequence[float], threads: int
) -> dict[str, Any]:
    """Return the metrics by temperature, and by kind of prompt if there are kinds."""
    passages = read_passages(texts)
    with Engine.from_pretrained(model, threads=threads, profile="off") as engine:
        teacher, source = Teacher(engine), open_draft_head(head, engine.executor)
        if size.is_chat:
            drawn = PromptSource(passages, SEED, held_out=True)
            kinds = {kind: [teacher.replied(drawn.prompt(kind)) for _ in range(size.prompts)] for kind in KINDS}
        else:
            kinds = {"": [teacher.encoded(text, size.prompt_tokens) for text in passages[: size.prompts]]}
        return {
            ", ".join(filter(None, (kind, f"temperature {temperature:g}"))): acceptance(
                teacher, source, prompts, size, SamplingParams(temperature=temperature)
            )
            for kind, prompts in kinds.items()
            for temperature in temperatures
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the acceptance of a draft head.")
    parser.add_argument("--model", type=Path, required=True, help="folder or GGUF file of the model")
    parser.add_argument("--head", type=Path, required=True, help="folder of the draft head")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="texts that are continued or summarized")
    parser.add_argument("--chat", action="store_true", help="reply to held-out prompts of five kinds")
    parser.add_argument("--prompts", type=int, default=Size.prompts, help="texts, or prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=Size.new_tokens, help="tokens after each prompt")
    parser.add_argument(
        "--draft-length", "--draft-tokens", type=int, default=Size.draft_length, help="tokens in a draft sequence"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="0 is greedy")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    given = parser.parse_args()
    size = Size(given.prompts, Size.prompt_tokens, given.new_tokens, given.draft_length, given.chat)
    print(json.dumps(measure(given.model, given.head, given.text, size, given.temperatures, given.threads), indent=2))


if __name__ == "__main__":
    main()
