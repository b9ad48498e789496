"""What a tree of drafts would bring over a chain: a draft head's own candidates, replayed on texts the model wrote.

    python tests/bench/bench_tree_gain.py --model DIR --head DIR --text FILE [--temperature 1] [--kappa 2:1.05,4:1.2 ..]

At each position the head (fp32, plain torch) expands its likeliest candidates level by level, as EAGLE-2 does (arXiv
2406.16858): WIDTH nodes a level by their path's probability, DEPTH levels. A step's tree is the nodes whose path is
likelier than a limit; its chain those of them that are the first choice all the way; its comb the chain's and those
that hang on it. Exact decoding accepts what lies on the path that the model took: its likeliest tokens, or drawn ones,
of which the head's likeliest are right less often. tokens: of a step, its own included; rows: what its pass verifies;
gain: tokens over the mean of kappa(rows), a pass's time over that of one row, straight between the given points and
through the last from 0. Each at its best limit and sharpness, by which the head's logits are multiplied: greedy text
takes the likeliest token more often than it is likely. Drafts are taken to cost nothing, which favours trees: they take
more. The last line is one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from hetero_ee import Engine, SamplingParams
from hetero_ee.hub.config_file import read_spec
from hetero_ee.speculation.sources.draft_head_file import read_draft_head

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from draft_head_module import TrainingHead
from draft_head_teacher import Teacher
from stories import read_stories

WIDTH, DEPTH = 8, 10
SHARPNESS, FAR = (0.5, 1.0, 2.0, 4.0), 100
LIMITS = np.geomspace(0.9, 0.01, 30)
# One layer of Llama-2-7B's shape behind 2,048 tokens on two cores of a Zen 4 and of a Sapphire Rapids, and weights
# alone on two of a Zen 5 (docs/benchmarks.md).
KAPPAS = ("2:1.02,4:1.11,8:1.47,16:2.93", "2:1.05,4:1.15,8:1.30,16:2.24", "2:1.04,4:1.07,8:1.20,16:2.18")


@dataclass(frozen=True)
class Node:
    """A candidate: its path's probability; whether the model took it; whether it is the first choice all the way, or
    hangs on what is."""

    chance: float
    is_right: bool
    is_chain: bool
    is_comb: bool


@dataclass
class Level:
    """Rows of one depth: tokens (w,), states that led to them (w, d), their paths, and ancestors' keys and values."""

    token_ids: Tensor
    states: Tensor
    log_chances: Tensor
    is_right: Tensor
    is_chain: Tensor
    keys: Tensor  # (heads, w, depth, head_dim)
    values: Tensor


class Expansion:
    """A head on one text: token_ids (n,), and the model's states (n, d) at them."""

    def __init__(self, head: TrainingHead, lm_head: Tensor, token_ids: Tensor, states: Tensor) -> None:
        self._head, self._lm_head, self._token_ids = head, lm_head, token_ids
        x = head.fc(torch.cat([head.embedding[token_ids[1:]], states[:-1]], -1))
        self._queries, self._keys, self._values = self._projected(x, torch.arange(len(x)))
        self._x = x

    def nodes(self, row: int, sharpness: float) -> list[Node]:
        """All candidates behind the newest token row + 1, and whether the text goes on with them."""
        keys, values = self._keys[:, : row + 1], self._values[:, : row + 1]
        nothing = self._keys[:, None, :0]
        state = self._finished(self._x[row : row + 1], self._queries[:, row : row + 1], keys, values, nothing, nothing)
        sure = torch.tensor([True])
        level, found = Level(self._token_ids[:1], state, torch.zeros(1), sure, sure, nothing, nothing), []
        for depth in range(1, DEPTH + 1):
            true = self._token_ids[row + 1 + depth]
            chances, parents, tokens = self._best(level, sharpness)
            right = level.is_right[parents] & (tokens == true)
            chain = level.is_chain[parents] & (torch.arange(len(tokens)) == self._first(level, parents, chances))
            columns = (chances.exp(), right, chain, level.is_chain[parents])
            found += [Node(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]
            if depth < DEPTH:
                level = self._next(level, row + depth, keys, values, chances, parents, tokens, right, chain)
        return found

    def _best(self, level: Level, sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
        log_chances, tokens = (sharpness * level.states @ self._lm_head.T).log_softmax(-1).topk(WIDTH)
        paths = (level.log_chances[:, None] + log_chances).flatten()
        chances, order = paths.topk(WIDTH)
        return chances, order // WIDTH, tokens.flatten()[order]

    @staticmethod
    def _first(level: Level, parents: Tensor, chances: Tensor) -> int:
        """Which of the candidates is the chain's next: the likeliest child of its last; -1 where none is kept."""
        children = [at for at, parent in enumerate(parents.tolist()) if level.is_chain[parent]]
        return max(children, key=lambda at: float(chances[at]), default=-1)

    def _next(
        self, level: Level, position: int, keys: Tensor, values: Tensor, chances: Tensor, parents: Tensor,
        tokens: Tensor, right: Tensor, chain: Tensor,
    ) -> Level:  # fmt: skip
        x = self._head.fc(torch.cat([self._head.embedding[tokens], level.states[parents]], -1))
        query, key, value = self._projected(x, torch.full((len(x),), position))
        own_keys = torch.cat([level.keys[:, parents], key[:, :, None]], 2)
        own_values = torch.cat([level.values[:, parents], value[:, :, None]], 2)
        states = self._finished(x, query, keys, values, own_keys, own_values)
        return Level(tokens, states, chances, right, chain, own_keys, own_values)

    def _projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (heads, rows, head_dim), turned."""
        spec, head = self._head.spec, self._head
        query, key, value = (
            part(x).view(len(x), -1, spec.head_dim).transpose(0, 1) for part in (head.q_proj, head.k_proj, head.v_proj)
        )
        group = spec.n_heads // spec.n_kv_heads
        query, key = head.turned(query, positions), head.turned(key, positions)
        return query, key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)

    def _finished(
        self, x: Tensor, query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        """The layer's output; keys, values: of the text; own: of each row and its ancestors."""
        head = self._head
        scores = torch.cat([query @ keys.transpose(1, 2), (own_keys @ query[..., None])[..., 0]], 2)
        weights = (scores * head.spec.head_dim**-0.5).softmax(-1)
        n = keys.shape[1]
        mixed = weights[..., :n] @ values + (weights[:, :, None, n:] @ own_values)[:, :, 0]
        return head.fed_forward(x + head.o_proj(mixed.transpose(0, 1).flatten(1)))


def steps(arguments: argparse.Namespace) -> Iterator[list[list[Node]]]:
    """Of each step the candidates at each sharpness."""
    spec, params = read_spec(arguments.model), SamplingParams(temperature=arguments.temperature, seed=0)
    stored = read_draft_head(arguments.head, spec)
    with Engine.from_pretrained(arguments.model, threads=arguments.threads, profile="off") as engine:
        teacher = Teacher(engine, arguments.model)
        head = TrainingHead(stored.spec, teacher.embedding)
        bias = {"fc.bias": torch.zeros(spec.hidden_size)}
        head.load_tensors(bias | load_file(arguments.head / "model.safetensors"))
        beginnings = [teacher.encoded(text, 16) for text in read_stories([arguments.text])[: arguments.prompts]]
        for tokens in teacher.continued(beginnings, arguments.new_tokens, [params]):
            trace = teacher.trace(tokens)
            expansion = Expansion(head, teacher.head, trace.token_ids, trace.states)
            for row in range(15, len(tokens) - DEPTH - 1, 3):
                yield [expansion.nodes(row, sharpness) for sharpness in SHARPNESS]


def is_of(node: Node, shape: str) -> bool:
    """Whether a chain, a comb or a tree has the node."""
    return shape == "tree" or (shape == "comb" and node.is_comb) or node.is_chain


def gain(found: list[list[list[Node]]], *, shape: str, kappa: list[tuple[float, ...]]) -> dict[str, float]:
    """At the limit and sharpness that are best."""
    rows = []
    for limit, (at, sharpness) in product(LIMITS, enumerate(SHARPNESS)):
        steps_ = [each[at] for each in found]
        kept = [[node for node in nodes if node.chance > limit and is_of(node, shape)] for nodes in steps_]
        tokens = float(np.mean([1 + sum(node.is_right for node in nodes) for nodes in kept]))
        n_rows = [1 + len(nodes) for nodes in kept]
        cost = float(np.mean(np.interp(n_rows, *kappa)))
        about = {"sharpness": sharpness, "limit": float(limit)}
        rows.append(about | {"tokens": tokens, "rows": float(np.mean(n_rows)), "gain": tokens / cost})
    return max(rows, key=lambda each: each["gain"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "head", "text"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--kappa", nargs="+", default=KAPPAS, help="rows:time over one row's, separated by commas")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        found = list(steps(arguments))
    print("| kappa | drafts | sharpness | limit | tokens a step | rows a pass | gain over one token a pass |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for kappa in arguments.kappa:
        points = [(1.0, 1.0), *(tuple(map(float, point.split(":"))) for point in kappa.split(","))]
        points.append((FAR * points[-1][0], FAR * points[-1][1]))  # from there on arithmetic, row after row
        for name in ("chain", "comb", "tree"):
            row = gain(found, shape=name, kappa=list(zip(*points, strict=True)))
            results.append({"kappa": kappa, "drafts": name, **row})
            limits = f"{row['sharpness']:g} | {row['limit']:.2f} | {row['tokens']:.2f} | {row['rows']:.1f}"
            print(f"| {kappa} | {name} | {limits} | {row['gain']:.2f} |")
    print(json.dumps({"steps": len(found), "rows": results}))


if __name__ == "__main__":
    main()
