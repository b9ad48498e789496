"""Exit-aware against exit-blind exit layers, on paper: a Markdown table of expected times. Nothing is measured.

    python scripts/compare_boundaries.py

Blind: as many whole layers on the GPU as fit, drafts exit where they end. Aware: every exit layer evaluated with the
exit rate and precision it has. Both with the same budget, the same published statistics of Llama-2-7B-chat, and the
best draft length; full: no drafts. Milliseconds a token on the shipped profiles, behind 512 tokens. The last column
is what the planner chooses; rows where exits don't pay are as much part of the table as the others.
"""

from dataclasses import replace

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.candidates import prefix_places
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.planning.problem import Problem, resolve
from hetero_ee.planning.schedule import Schedule, exit_schedules, full_schedule
from hetero_ee.planning.statistics import ExitStatistics, published_statistics
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_names, reference_profile

MODELS = ("llama-2-7b", "llama-2-13b")
SHARES = (0.25, 0.5, 0.75)  # of the layers that fit on the GPU
CONTEXT_TOKENS = 512
GIB = 2**30
HEAD = (
    "| machine | model | VRAM GiB | GPU layers | full ms | blind ms | aware ms | exit layer | ratio | chosen |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    print(HEAD)
    for name in reference_names():
        for model in MODELS:
            spec = known_spec(model)
            for share in SHARES:
                row(reference_profile(name), model, spec, round(share * spec.n_layers))


def row(profile: HardwareProfile, model: str, spec: ModelSpec, n_gpu_layers: int) -> None:
    """Prints one line of the table, for the budget that just holds so many layers."""
    statistics = published_statistics(spec.n_layers)
    limits = Limits(context_tokens=CONTEXT_TOKENS, kv_type="fp16", gpu_layers=n_gpu_layers)
    assert profile.gpu is not None
    card = replace(profile, gpu=replace(profile.gpu, free_bytes=1024 * GIB))  # the budget is what counts here
    budget = plan(spec, card, limits).n_bytes("gpu")
    problem = resolve(spec, card, replace(limits, gpu_layers=None, vram_budget_bytes=budget), statistics)
    places = prefix_places(problem, n_gpu_layers)
    full = full_schedule(problem, places, CONTEXT_TOKENS)
    blind, aware = exit_layers(problem, places, n_gpu_layers)
    chosen = chosen_mode(problem, card, statistics)
    gain = (blind or full).round.seconds_per_token / aware.round.seconds_per_token
    cells = [profile.name, model, f"{budget / GIB:.1f}", f"{n_gpu_layers} of {spec.n_layers}", ms(full)]
    cells += [ms(blind) if blind else f"{ms(full)} (no exits)", ms(aware), str(aware.exit_layer), f"{gain:.2f}", chosen]
    print(f"| {' | '.join(cells)} |")


def exit_layers(problem: Problem, places: tuple[str, ...], n_gpu_layers: int) -> tuple[Schedule | None, Schedule]:
    """Exact mode at the end of the GPU's layers, None where nothing exits there, and at the best of all exit layers."""
    schedules = exit_schedules(problem, places, CONTEXT_TOKENS)
    blind = next((schedule for schedule in schedules if schedule.exit_layer == n_gpu_layers), None)
    return blind, min(schedules, key=lambda schedule: schedule.round.seconds_per_token)


def chosen_mode(problem: Problem, profile: HardwareProfile, statistics: ExitStatistics) -> str:
    """What the planner makes of the same request, placing freely."""
    made = plan(problem.spec, profile, problem.limits, statistics, predict_at_tokens=CONTEXT_TOKENS)
    where = f" at {made.exit_layer}" if made.exit_layer else ""
    return f"{made.mode}{where}, {1000 / made.prediction.generated_tokens_per_s:.1f} ms"


def ms(schedule: Schedule) -> str:
    return f"{schedule.round.seconds_per_token * 1e3:.1f}"


if __name__ == "__main__":
    main()
