"""What hot neurons on the GPU and cold ones on the CPU bring over whole FFNs: both plans at the same VRAM, emulated.

    python tests/bench/bench_hot_cold.py [--hardware rtx-4060-laptop-8gb] [--model llama-2-13b] [--active 0.1]
        [--predicted 0.2] [--json]

Each budget has a plan that knows how often which neurons are active, and one that does not, in full mode; both run as
passes without numbers on the emulated machine. Curves: h^k of a token's neurons are among the first h of all, with k
from the points of PowerInfer (arXiv 2312.12456), 26 % for 80 % (OPT-30B) and 43 % for 80 % (ReGLU-70B); and those of
tests/assets/relu_twin, as measured by hetero_ee/sparsity/order.py. With a predictor, a token computes the gate of
--predicted of the neurons.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import log

import numpy as np

from hetero_ee.decoding.simulation import of_shapes
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_profile

SHARES = np.arange(1, 33) / 32
TWIN = (0.17, 0.297, 0.407, 0.503, 0.59, 0.664, 0.728, 0.784, 0.83, 0.87, 0.904, 0.933, 0.958, 0.978, 0.992, 1.0)
CURVES = {
    "OPT-30B": SHARES ** (log(0.8) / log(0.26)),
    "ReGLU-70B": SHARES ** (log(0.8) / log(0.43)),
    "relu_twin": np.interp(SHARES, np.arange(17) / 16, (0.0, *TWIN)),
}
BUDGETS = (0.4, 0.5, 0.6, 0.75, 0.9)  # of the weights
CONTEXT_TOKENS, PROMPT_TOKENS, NEW_TOKENS = 1024, 512, 64


@dataclass(frozen=True, slots=True)
class Row:
    """One budget. Emulated tokens a second, and what was expected of the split plan; n_split: FFNs on both devices."""

    predicted: bool
    budget_share: float
    curve: str
    whole_per_s: float
    split_per_s: float
    expected_per_s: float
    n_split: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="rtx-4060-laptop-8gb")
    parser.add_argument("--model", default="llama-2-13b")
    parser.add_argument("--active", type=float, default=0.1, help="share of neurons that a token needs")
    parser.add_argument("--predicted", type=float, default=0.2, help="share whose gate a predictor lets be computed")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    exact = replace(known_spec(arguments.model), neuron_major=True, active_shares=(arguments.active, 1.0))
    rank = -(-exact.hidden_size // 8 // 32) * 32
    predicted = replace(exact, first_in_rows=True, predictor_rank=rank, predicted_share=arguments.predicted)
    profile = reference_profile(arguments.hardware)
    rows = [row for spec in (exact, predicted) for row in rows_of(spec, profile)]
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else table(rows))


def rows_of(spec: ModelSpec, profile: HardwareProfile) -> Iterator[Row]:
    n_bytes = sum(part.weight_bytes for part in model_parts(spec, "fp16"))
    for budget in BUDGETS:
        limits = Limits(vram_budget_bytes=int(budget * n_bytes), context_tokens=CONTEXT_TOKENS, mode="full")
        whole_s, _, _ = text_s(spec, profile, limits)
        for name, curve in CURVES.items():
            known = replace(spec, hot_curve=tuple(map(float, curve)))
            split_s, expected_s, n_split = text_s(known, profile, limits)
            rates = [NEW_TOKENS / each for each in (whole_s, split_s, expected_s)]
            yield Row(spec.predictor_rank > 0, budget, name, *rates, n_split)


def text_s(spec: ModelSpec, profile: HardwareProfile, limits: Limits) -> tuple[float, float, int]:
    """Seconds emulated and expected, and how many FFNs are split."""
    made = make_plan(spec, profile, limits)
    found, _ = of_shapes(spec, made, profile, PROMPT_TOKENS, NEW_TOKENS + 1)
    assert found.predicted_generation_s is not None, "nothing is drafted in full mode"
    n_split = sum(placement.is_split for placement in made.decode_placements)
    return found.generation_s, found.predicted_generation_s, n_split


def table(rows: list[Row]) -> str:
    lines = ["| VRAM, of the weights | predictor | curve | whole FFNs | hot neurons | gain | expected | FFNs split |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        lines.append(
            f"| {row.budget_share:.0%} | {'yes' if row.predicted else 'no'} | {row.curve} | {row.whole_per_s:.1f} "
            f"tokens/s | {row.split_per_s:.1f} | {row.split_per_s / row.whole_per_s:.2f} | {row.expected_per_s:.1f} "
            f"| {row.n_split} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
