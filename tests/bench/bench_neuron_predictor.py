"""Ways to say which neurons of a ReLU model are active before its gate is multiplied, at what each of them reads.

    python tests/bench/bench_neuron_predictor.py --data DIR [--model tests/assets/relu_twin] [--json]

DIR holds the TinyStories excerpts. Of every layer: a score for each neuron, and above which score it counts as
predicted, fitted for each neuron on 8,192 tokens of stories_a.txt so that 90 or 95 % of its active ones are. Measured
on 4,096 of stories_b.txt: the share of all neurons that is predicted then, and of active ones that is found. read:
bytes over those of the gate in int4, of the scores and of the predicted neurons' rows. Nothing here is by the clock.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import neuron_blocks
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.sparsity.factors import Factors, FactorTraining, fit_factors, rank_of
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from hetero_ee.weights.weight import Weight

TWIN = Path(__file__).parents[1] / "assets" / "relu_twin"
TEXTS = {"stories_a.txt": 8192, "stories_b.txt": 4096}  # to fit on and to measure on, in tokens
WINDOW_TOKENS, CHARACTERS_A_TOKEN = 256, 8
INT4_BITS, GROUP = 4.5, 32
RECALLS = (0.9, 0.95)
Scores = Callable[[Tensor], Tensor]  # of inputs (m, hidden): (m, ffn)


@dataclass(frozen=True, slots=True)
class Row:
    """One way, over all layers. recall: of active neurons; predicted: of all; read: see above."""

    way: str
    asked: float
    recall: float
    predicted: float
    read: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=TWIN)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = list(measured(arguments.model, arguments.data))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("| way | asked for | found | predicted | read of the gate |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.way} | {row.asked:.0%} | {row.recall:.1%} | {row.predicted:.1%} | {row.read:.2f} |")


class Gates(BatchedTorchOps):
    """Keeps what gates are multiplied with."""

    def __init__(self, gates: list[Weight]) -> None:
        self.inputs: dict[int, list[Tensor]] = {id(gate): [] for gate in gates}

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        self.inputs.get(id(weight), []).append(x)
        return super().product(x, weight, bias)


def measured(model: Path, data: Path) -> Iterator[Row]:
    fitted, held_out = (layers_of(model, data / name, n_tokens) for name, n_tokens in TEXTS.items())
    found: dict[tuple[str, float], list[tuple[float, float, float]]] = {}
    for (gate, x), (_, x_new) in zip(fitted, held_out, strict=True):
        is_active, is_active_new = x @ gate.T > 0, x_new @ gate.T > 0
        for way, bits, scores in ways(gate, x, is_active):
            values, values_new = scores(x), scores(x_new)
            for asked in RECALLS:
                is_predicted = values_new > limits(values, is_active, asked)
                recall = float((is_predicted & is_active_new).sum() / is_active_new.sum())
                share = float(is_predicted.float().mean())
                found.setdefault((way, asked), []).append((recall, share, bits / (INT4_BITS * gate.numel()) + share))
    for (way, asked), layers in found.items():
        yield Row(way, asked, *torch.tensor(layers).mean(0).tolist())


def layers_of(model: Path, text: Path, n_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Of each layer the gate (ffn, hidden), and what it is multiplied with, (n_tokens, hidden)."""
    spec = read_spec(model)
    weights = load_dense(Checkpoint(model, spec))
    gates = [weights.matrices[block.tensors["gate_up"].name] for block in neuron_blocks(spec)]
    ids = Tokenizer.load(model, spec.vocab_size).encode(text.read_text()[: CHARACTERS_A_TOKEN * n_tokens])[:n_tokens]
    seen = Gates(gates)
    executor = ReferenceExecutor(spec, weights, WINDOW_TOKENS, seen)
    for first in range(0, n_tokens, WINDOW_TOKENS):
        sequence = executor.cache.open_new()
        executor.hidden(Batch.of_sequence(sequence, 0, ids[first : first + WINDOW_TOKENS]))
        executor.cache.close(sequence)
    return [(gate.dequantize()[: spec.ffn_size], torch.cat(seen.inputs[id(gate)])) for gate in gates]


def ways(gate: Tensor, x: Tensor, is_active: Tensor) -> Iterator[tuple[str, float, Scores]]:
    """Names, bits of what each way reads for its scores, and the scores."""
    yield "signs of inputs and weights (SparseInfer)", gate.numel(), partial(signs_agree, gate)
    for n_bits in (2, 3):
        rounded = coarse(gate, n_bits)
        yield f"the gate in {n_bits} bits", (n_bits + 16 / GROUP) * gate.numel(), partial(product, rounded)
    for rank in (rank_of(gate.shape[1]), 2 * rank_of(gate.shape[1])):
        bits = INT4_BITS * rank * sum(gate.shape)
        for name, n_steps in (("regression", 0), ("fitted as calibration does", 300)):
            training = FactorTraining(n_steps=n_steps)
            factors = fit_factors(x, is_active.float(), gate, torch.zeros(len(gate)), rank, training)
            yield f"rank {rank}, {name}", bits, partial(logits, factors)


def signs_agree(gate: Tensor, x: Tensor) -> Tensor:
    return x.sign() @ gate.sign().T


def product(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight.T


def logits(factors: Factors, x: Tensor) -> Tensor:
    return torch.addmm(factors.bias, x @ factors.inner.T, factors.outer.T)


def coarse(gate: Tensor, n_bits: int) -> Tensor:
    """Symmetric, in groups along the rows, by the largest magnitude."""
    groups = gate.view(len(gate), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / (2 ** (n_bits - 1) - 1)
    rounded: Tensor = (groups / scale).round() * scale
    return rounded.view_as(gate)


def limits(scores: Tensor, is_active: Tensor, recall: float) -> Tensor:
    """For each neuron the score above which so many of its active ones are; below all where it never was active."""
    ordered = scores.masked_fill(~is_active, -torch.inf).sort(0, descending=True).values
    n_found = (is_active.sum(0) * recall).ceil().long().clamp(1, len(scores) - 1)
    return ordered.gather(0, n_found[None])[0]


if __name__ == "__main__":
    main()
