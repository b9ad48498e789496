"""Makes the plans whose placements and predictions tests/golden/plans.json keeps.

    python -m tests.golden.plans

rewrites that file. Do so only for a change that is meant to change plans.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import (
    DraftRates,
    PromptReading,
    Statistics,
)
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile, RowsTime
from hetero_ee_profiles.measurement import derived
from hetero_ee_profiles.reference import reference_profile
from tests.published_exits import published_depths, published_statistics
from tests.shipped import MACHINES, SHAPES

RATES = (
    *("prompt_tokens_per_s", "generated_tokens_per_s", "ceiling_tokens_per_s", "cpu_tokens_per_s"),
    *("other_mode_tokens_per_s", "request_s", "first_token_s", "batch_per_pass", "tokens_per_pass", "mean_depth"),
)
GOLDEN_FILE = Path(__file__).with_name("plans.json")
HOT_CURVE = tuple((i / 32) ** 0.2 for i in range(1, 33))
SMALL_RAM_BYTES, SMALL_VRAM_BYTES = 6 * 2**30, 3 * 2**30


def specs() -> dict[str, ModelSpec]:
    """Four dense models, one of them with sliding windows as well, and a sparse one with predictors."""
    windows = tuple(512 if layer % 2 else None for layer in range(32))
    sparse = replace(
        known_spec("llama-2-7b"),
        neuron_major=True,
        active_shares=(0.1, 1.0),
        hot_curve=HOT_CURVE,
        first_in_rows=True,
        predictor_rank=512,
        predicted_share=0.2,
    )
    dense = {name: known_spec(name) for name in SHAPES}
    dense["llama-3-8b"] = replace(dense["llama-3-8b"], sliding_windows=windows)
    return dense | {"sparse-7b": sparse}


def scenarios(spec: ModelSpec) -> dict[str, tuple[Limits, Statistics]]:
    """The requests that are planned for each pair of model and machine."""
    exits = published_statistics(spec.n_layers)
    early = Statistics(exits, depths=published_depths(spec.n_layers, 0.05))
    every_other = ((r"layers\.\d*[02468]\.ffn", "stream"),)
    context = Limits(context_tokens=2048)
    return {
        "automatic": (Limits(), Statistics(exits)),
        "full": (replace(context, mode="full", kv_type="int8"), Statistics()),
        "little memory": (
            replace(context, vram_budget_bytes=SMALL_VRAM_BYTES, ram_budget_bytes=SMALL_RAM_BYTES),
            Statistics(),
        ),
        "streamed": (replace(context, overrides=every_other), Statistics(exits)),
        "drafts": (replace(context, mode="exact"), Statistics(drafts=draft_rates())),
        "specee": (replace(context, mode="specee"), early),
        "certified": (replace(context, mode="certified", draft_length=4, gpu_layers=8), early),
        "CPU": (replace(context, gpu_layers=0), Statistics()),
    }


def draft_rates() -> DraftRates:
    """A draft head, by the CPU or the GPU."""
    by_gpu = DraftRates("golden", (0.7, 0.6, 0.5), 5e-4, _reading(on_gpu=True), partial(_head_bytes, 2**28))
    return DraftRates("golden", (0.7, 0.6, 0.5), 2e-3, _reading(on_gpu=False), partial(_head_bytes, 2**27), 0, by_gpu)


def _reading(*, on_gpu: bool) -> PromptReading:
    return PromptReading(lambda m, context: m * (1e-5 if on_gpu else 1e-4) + 1e-9 * context, on_gpu)


def _head_bytes(n_bytes: int, context_tokens: int, n_sequences: int) -> int:
    return n_bytes + 1024 * context_tokens


def profiles() -> dict[str, HardwareProfile]:
    """The shipped machines, as if sparse FFNs had been measured on them."""
    return {name: _with_rows(reference_profile(name)) for name in MACHINES}


def _with_rows(profile: HardwareProfile) -> HardwareProfile:
    assert profile.gpu is not None
    return replace(profile, gpu=_rows(profile.gpu), cpu=tuple(map(_rows, profile.cpu)))


def _rows(times: DeviceTimes) -> DeviceTimes:
    whole = times.matmul_s("int4", 22016, 4096, 1)
    measured = partial(derived, unit="s", origin=times.call.origin)
    pairs = [(m, share) for m in (1, 8) for share in (0.1, 0.5, 1.0)]
    rows = tuple(RowsTime(22016, 4096, m, share, measured(whole * m * (1 + 6 * share) / 5)) for m, share in pairs)
    return replace(times, rows=rows)


def plans_of(spec: ModelSpec, profile: HardwareProfile) -> dict[str, dict[str, Any]]:
    """The plan's summary for each request."""
    return {
        request: summary(plan(spec, profile, limits, statistics))
        for request, (limits, statistics) in scenarios(spec).items()
    }


def every_plan() -> Iterator[tuple[str, dict[str, Any]]]:
    """The plans of each pair of model and machine, by the pair's name."""
    for model, spec in specs().items():
        for machine, profile in profiles().items():
            yield f"{model} on {machine}", plans_of(spec, profile)


def summary(made: Plan) -> dict[str, dict[str, Any]]:
    """What must not change: decisions to the byte, and what is expected of them to 12 digits."""
    expected = made.prediction
    terms = (*expected.decode_terms, *expected.prefill_terms, *expected.layer_terms)
    numbers = {field: getattr(expected, field) for field in RATES}
    numbers |= {f"{term.name} s": term.seconds for term in terms}
    numbers |= {f"{term.name} bytes": term.n_bytes for term in expected.moved_terms}
    return {
        "decided": {
            "decode": _runs([str(part.decode_placement) for part in made.parts]),
            "prefill": _runs([str(part.prefill_placement) for part in made.parts]),
            "mode": f"{made.mode} {made.drafts} {made.exit_layer} {made.draft_length} {made.exit_layers}",
            "tokens": f"{made.context_tokens} {made.prefill_chunk_tokens} {expected.context_tokens}",
            "memory": {f"{term.device} {term.name}": term.n_bytes for term in made.memory},
            "weights": sum(part.weight_bytes for part in made.parts),
        },
        "expected": {name: float(f"{value:.12g}") for name, value in numbers.items() if value is not None},
    }


def _runs(placements: list[str]) -> str:
    """Run-length encode: "gpu*3 cpu" for three parts on the GPU and one on the CPU."""
    runs = [(each, len(list(group))) for each, group in groupby(placements)]
    return " ".join(each if n == 1 else f"{each}*{n}" for each, n in runs)


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(plans)}" for name, plans in every_plan())
    GOLDEN_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
