"""What hot neurons on the GPU and cold ones on the CPU could bring at most over whole blocks, by a machine's profile.

    python tests/bench/bench_hot_cold.py [--hardware rtx-4060-laptop-8gb] [--model llama-2-13b] [--active 0.1] [--json]

PowerInfer (arXiv 2312.12456) keeps often active neurons on the GPU and the others on the CPU. Compared are, with the
same VRAM and exact sparsity, the plan that this project makes, of whole attentions and FFNs, and a bound: attention,
head and so many hot neurons of every layer on the GPU, both devices at once, the hidden state once to the CPU and once
back a layer, and nothing for merging, for launches, or for a GPU that waits. The hot share h of the neurons takes h^k
of the activations, with k from the paper's points: 26 % take 80 % (OPT-30B), 43 % take 80 % (ReGLU, 70B). Both also
with a predictor that spares the gate rows of inactive neurons and costs nothing. Predicted, not measured.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import log

from hetero_ee.models.blocks import BlockKind
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import Part, model_parts
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.costs import ON_GPU, Costs
from hetero_ee.planning.times.prediction import predicted_text_s
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile
from hetero_ee_profiles.reference import reference_profile

CURVES = {"OPT-30B": log(0.8) / log(0.26), "ReGLU-70B": log(0.8) / log(0.43)}  # k
BUDGETS = (0.4, 0.5, 0.6, 0.75, 0.9)  # of the weights
CONTEXT_TOKENS, N_TOKENS = 1024, 64


@dataclass(frozen=True, slots=True)
class Row:
    """One budget. Tokens a second; hot_share: of each layer's neurons that fit on the GPU; predicted: of the same, with
    a predictor."""

    budget_share: float
    curve: str
    whole_per_s: float
    whole_predicted_per_s: float
    hot_share: float
    split_per_s: float
    split_predicted_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="rtx-4060-laptop-8gb")
    parser.add_argument("--model", default="llama-2-13b")
    parser.add_argument("--active", type=float, default=0.1, help="share of neurons that a token needs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    spec = replace(known_spec(arguments.model), neuron_major=True, active_shares=(arguments.active, 1.0))
    rows = rows_of(spec, reference_profile(arguments.hardware))
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else table(rows))


def rows_of(spec: ModelSpec, profile: HardwareProfile) -> list[Row]:
    parts = model_parts(spec, "fp16")
    rows = []
    for budget in BUDGETS:
        n_bytes = int(budget * sum(part.weight_bytes for part in parts))
        limits = Limits(vram_budget_bytes=n_bytes, context_tokens=CONTEXT_TOKENS, mode="full")
        made = make_plan(spec, profile, limits)
        whole_s = predicted_text_s(spec, profile, made, Statistics(), N_TOKENS, CONTEXT_TOKENS // 2)
        assert whole_s is not None, "nothing is drafted in full mode"
        costs, token_s = Costs(spec, profile, made.threads), whole_s / N_TOKENS
        spared_s = sum(
            gate_s(spec, device_of(costs, placement), 1.0) * (1 - spec.active_shares[0])
            for part, placement in zip(parts, made.decode_placements, strict=True)
            if part.kind is BlockKind.FFN
        )
        for curve, exponent in CURVES.items():
            hot, split_s, predicted_s = bound(spec, costs, parts, n_bytes, exponent)
            if hot >= 0:
                rows.append(
                    Row(budget, curve, 1 / token_s, 1 / (token_s - spared_s), hot, 1 / split_s, 1 / predicted_s)
                )
    return rows


def device_of(costs: Costs, placement: str) -> DeviceTimes:
    gpu = costs.profile.gpu
    assert gpu is not None, "this is about a GPU"
    return gpu if placement in ON_GPU else costs.cpu


def bound(
    spec: ModelSpec, costs: Costs, parts: Sequence[Part], budget_bytes: int, exponent: float
) -> tuple[float, float, float]:
    """The hot share and seconds a token, without and with a predictor; a negative share where attention has no room."""
    attentions, ffns = ([p for p in parts if p.kind is kind] for kind in (BlockKind.ATTENTION, BlockKind.FFN))
    head = next(p for p in parts if p.kind is BlockKind.HEAD)
    left = budget_bytes - head.weight_bytes - sum(p.weight_bytes + p.kv_bytes(CONTEXT_TOKENS) for p in attentions)
    hot = min(1.0, left / sum(p.weight_bytes for p in ffns))
    if hot < 0:
        return hot, 0.0, 0.0
    active, activations = spec.active_shares[0], hot**exponent
    gpu_s = neurons_s(spec, device_of(costs, "gpu"), hot, active * activations, 1.0)
    cold_s, spared_s = (
        neurons_s(spec, costs.cpu, 1 - hot, active * (1 - activations), read) if hot < 1 else 0.0
        for read in (1.0, active)
    )
    crossings_s = 2 * costs.transfer_s(1) if hot < 1 else 0.0
    fixed_s = costs.part_s(head, "gpu", 1, CONTEXT_TOKENS)
    fixed_s += sum(costs.part_s(p, "gpu", 1, CONTEXT_TOKENS // 2) for p in attentions)
    both = [fixed_s + len(ffns) * max(gpu_s, crossings_s + cpu_s) for cpu_s in (cold_s, spared_s)]
    return hot, both[0], both[1]


def neurons_s(spec: ModelSpec, times: DeviceTimes, share: float, used: float, gate_read: float) -> float:
    """Of this share of a layer's neurons: its gate rows, so many of them, and up and down of what is used of all."""
    n_rows = 2 * max(1, round(share * spec.ffn_size))
    rows_s = times.rows_s(n_rows, spec.hidden_size, 1, min(1.0, used / max(share, 1e-9)))
    return gate_read * gate_s(spec, times, share) + rows_s


def gate_s(spec: ModelSpec, times: DeviceTimes, share: float) -> float:
    """A layer's gate, of this share of its neurons."""
    return times.matmul_s("int4", max(1, round(share * spec.ffn_size)), spec.hidden_size, 1)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| VRAM, of the weights | curve | whole blocks | with a predictor | hot neurons | split | with a predictor |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        gains = (row.whole_predicted_per_s, row.split_per_s, row.split_predicted_per_s)
        whole_predicted, split, split_predicted = (f"{each / row.whole_per_s:.2f}" for each in gains)
        lines.append(
            f"| {row.budget_share:.0%} | {row.curve} | {row.whole_per_s:.1f} tokens/s | {whole_predicted} "
            f"| {row.hot_share:.0%} | {split} | {split_predicted} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
