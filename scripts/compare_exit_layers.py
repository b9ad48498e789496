"""Exit-aware against exit-blind planning, on paper: a Markdown table of expected times. Nothing is measured.

    python scripts/compare_exit_layers.py

Blind: as many whole layers on the GPU as fit, drafts exit where they end. Aware: every exit layer evaluated with the
exit rate and precision it has. Both with the same budget, the same published statistics of Llama-2-7B-chat, and the
best draft length; full: no drafts. Milliseconds a token on the shipped profiles at context length 512. The last column
is what the planner chooses; lines where exits don't pay are as much part of the table as the others.
"""

from dataclasses import replace

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.schedule import Schedule, exit_schedules, full_schedule
from hetero_ee.planning.statistics import Statistics, published_statistics
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_names, reference_profile

MODELS = ("llama-2-7b", "llama-2-13b")
SHARES = (0.25, 0.5, 0.75)  # of the layers that fit on the GPU
CONTEXT_TOKENS = 512
GIB = 2**30
HEAD = (
    "| machine | model | VRAM GiB | GPU layers | full ms | blind ms | aware ms | exit layer "
    "| blind / aware | chosen |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    print(HEAD)
    for name in reference_names():
        for model in MODELS:
            spec = known_spec(model)
            for share in SHARES:
                print_line(reference_profile(name), model, spec, round(share * spec.n_layers))


def print_line(profile: HardwareProfile, model: str, spec: ModelSpec, n_gpu_layers: int) -> None:
    """One line of the table, for the budget that just holds so many layers."""
    statistics = Statistics(published_statistics(spec.n_layers))
    limits = Limits(context_tokens=CONTEXT_TOKENS, kv_type="fp16", gpu_layers=n_gpu_layers)
    assert profile.gpu is not None
    card = replace(profile, gpu=replace(profile.gpu, free_bytes=1024 * GIB))  # the budget is what counts here
    budget = plan(spec, card, limits).n_bytes("gpu")
    limits = replace(limits, gpu_layers=None, vram_budget_bytes=budget)
    problem = resolve(spec, card, limits, statistics)
    n_parts = 2 * n_gpu_layers
    placements = ("cpu", *["gpu"] * n_parts, *["cpu"] * (len(problem.layers) - n_parts), "gpu")
    full = full_schedule(problem, placements, CONTEXT_TOKENS)
    schedules = exit_schedules(problem, placements, CONTEXT_TOKENS)
    blind = next((schedule for schedule in schedules if schedule.exit_layer == n_gpu_layers), None)
    aware = min(schedules, key=lambda schedule: schedule.token_s)
    chosen = plan(spec, card, limits, statistics, predict_at_tokens=CONTEXT_TOKENS)
    where = f" at {chosen.exit_layer}" if chosen.exit_layer else ""
    cells = [profile.name, model, f"{budget / GIB:.1f}", f"{n_gpu_layers} of {spec.n_layers}", ms(full)]
    cells += [ms(blind) if blind else f"{ms(full)} (no exits)", ms(aware), str(aware.exit_layer)]
    cells += [f"{(blind or full).token_s / aware.token_s:.2f}"]
    cells += [f"{chosen.mode}{where}, {1000 / chosen.prediction.generated_tokens_per_s:.1f} ms"]
    print(f"| {' | '.join(cells)} |")


def ms(schedule: Schedule) -> str:
    return f"{schedule.token_s * 1e3:.1f}"


if __name__ == "__main__":
    main()
