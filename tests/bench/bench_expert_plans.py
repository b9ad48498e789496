"""What splitting every layer's experts between GPU and CPU brings over splitting a model by whole layers, emulated.

    python -m tests.bench.bench_expert_plans [--model tests/assets/hybrid_moe] [--hardware rtx-3060-12gb]
        [--routes FILE] [--json]

Each share of the routed experts is on the GPU twice: as the first experts of each layer, beside everything else, and as
the whole of the first layers, the others wholly on the CPU. With --routes, the JSON line of bench_expert_routes.py,
there is a third row: each layer's most popular experts, with the hits that were counted in that text. Steps are run on
the emulated machine and charged the times of its profile; their rate is compared with what the plan promised. --model
may also name a known shape, such as qwen3.6-35b-a3b. The last line is one JSON document.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hetero_ee.decoding.simulation import of_shapes
from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee_profiles.reference import reference_profile

MODEL = Path(__file__).parents[1] / "assets" / "hybrid_moe"
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the experts, in the GPU's memory
PARTS = 32  # of which a split placement names how many are on the GPU
N_PROMPT, N_GENERATED = 24, 48


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: tokens per second while generating."""

    split: str
    experts_on_gpu: float
    emulated: float | None = None
    predicted: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a folder, or a known shape's name")
    parser.add_argument("--hardware", default="rtx-3060-12gb", help="a shipped profile")
    parser.add_argument("--routes", type=Path, help="a file whose last line bench_expert_routes.py printed")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    arguments = parser.parse_args()
    folder = Path(arguments.model)
    curve = () if arguments.routes is None else json.loads(arguments.routes.read_text().splitlines()[-1])["hot_curve"]
    spec = read_spec(folder) if folder.is_dir() else known_spec(arguments.model)
    rows = rows_of(spec, arguments.hardware, tuple(curve))
    if not arguments.json:
        print("| split | experts on the GPU | emulated, tokens/s | predicted |\n|---|---|---|---|")
        for row in rows:
            rates = " | ".join("too large" if x is None else f"{x:.1f}" for x in (row.emulated, row.predicted))
            print(f"| {row.split} | {row.experts_on_gpu:.0%} | {rates} |")
    print(json.dumps([asdict(row) for row in rows]))


def rows_of(spec: ModelSpec, hardware: str, hot_curve: tuple[float, ...] = ()) -> list[Row]:
    """Every way to split, at every share."""
    rows = []
    for share in SHARES:
        n_hot, n_layers = round(share * PARTS), round(share * spec.n_layers)
        experts = "gpu" if n_hot == PARTS else f"hot-{n_hot}"
        ways = {"experts": spec} | ({"popular experts": replace(spec, hot_curve=hot_curve)} if hot_curve else {})
        for name, each in ways.items():
            rows.append(row_of(name, n_hot / PARTS, each, hardware, ((".*moe", experts), (".*", "gpu"))))
        first = "|".join(rf"layers\.{number}\..*" for number in range(n_layers))
        layers = (
            ((first, "gpu"), ("layers.*", "cpu"), (".*", "gpu")) if n_layers else (("layers.*", "cpu"), (".*", "gpu"))
        )
        rows.append(row_of("layers", n_layers / spec.n_layers, spec, hardware, layers))
    return rows


def row_of(name: str, share: float, spec: ModelSpec, hardware: str, overrides: tuple[tuple[str, str], ...]) -> Row:
    """One plan, emulated; rates are None if it does not fit."""
    profile = reference_profile(hardware)
    try:
        made = plan(spec, profile, Limits(context_tokens=512, mode="full", overrides=overrides))
    except UsageError:
        return Row(name, share)
    simulation, _ = of_shapes(spec, made, profile, N_PROMPT, N_GENERATED)
    return Row(name, share, N_GENERATED / simulation.generation_s, N_GENERATED / simulation.predicted_generation_s)


if __name__ == "__main__":
    main()
