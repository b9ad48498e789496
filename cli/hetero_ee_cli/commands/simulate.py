"""`hetero-ee simulate`: the time line a prompt would have on another machine, with the model's real tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.options.placement import (
    DraftHead,
    PlanFile,
    check_draft_head,
    check_trace,
    limits_beside_plan,
)
from hetero_ee_cli.options.planning import (
    DraftTokens,
    GpuLayers,
    KvType,
    Mode,
    ModelArgument,
    Override,
    RamBudget,
    RandomWeights,
    VramBudget,
    VramMargin,
    hardware_from,
    limits_from,
)
from hetero_ee_cli.options.settings import CtxSize, Offline, Quantizer, Threads
from hetero_ee_cli.reports.run_report import draft_words, drafts_document
from hetero_ee_cli.terminal.output import printable, say
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.decoding.simulation import Simulation
    from hetero_ee.engine import Engine
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee.runtime.devices.timeline import Span
    from hetero_ee.speculation.statistics import DraftStatistics
    from hetero_ee_profiles.hardware import HardwareProfile

DEFAULT_PROMPT = "Once upon a time"
Found = tuple["Simulation", "Plan", list["Span"], "Drafted | None"]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of a simulated text. predicted_tokens_per_pass: None where nothing tells how good they are."""

    origin: str
    counts: "DraftStatistics"
    predicted_tokens_per_pass: float | None


def simulate(
    model: ModelArgument = None,
    hardware: Annotated[
        str, typer.Option(help="A shipped profile by name, or a profile's JSON file.")
    ] = "rtx-4060-laptop-8gb",
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to go on from.")] = DEFAULT_PROMPT,
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", min=1, max=2**20, help="Tokens to generate.")
    ] = 64,
    random_weights: RandomWeights = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=2**20, help="Length of the prompt, with --random-weights.")
    ] = 512,
    vram_budget: VramBudget = None,
    vram_margin: VramMargin = None,
    ram_budget: RamBudget = None,
    gpu_layers: GpuLayers = None,
    override: Override = None,
    ctx_size: CtxSize = None,
    kv_type: KvType = None,
    mode: Mode = None,
    draft_length: DraftTokens = None,
    plan_file: PlanFile = None,
    draft_head: DraftHead = None,
    quantizer: Quantizer = None,
    threads: Threads = None,
    offline: Offline = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the time line there, for chrome://tracing or Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a prompt through the real model as another machine would: its tokens, and the time they would take there.

    Nothing printed is a measurement of that machine. With --random-weights nothing is computed: only times come out.
    """
    with ending_at_once():
        from hetero_ee.planning.plan import Plan
    limiting: dict[str, Any] = {
        "vram_budget": vram_budget,
        "vram_margin": vram_margin,
        "ram_budget": ram_budget,
        "gpu_layers": gpu_layers,
        "override": override,
        "ctx_size": ctx_size,
        "kv_type": kv_type,
        "mode": mode,
        "draft_length": draft_length,
        "threads": None,
    }
    limits_beside_plan(plan_file, **limiting)
    limits = limits_from(**limiting)
    check_draft_head(draft_head)
    check_trace(trace)
    profile = hardware_from(hardware)
    plan = None if plan_file is None else Plan.load(plan_file)
    if plan is not None and plan.hardware != profile.name:
        say(f"The plan was made for {printable(plan.hardware)}; here it runs on {profile.name}.")
    if random_weights is not None:
        found = _of_shapes(random_weights, model, profile, limits, plan, (prompt_tokens, max_new_tokens))
    else:
        options = {"model": model, "offline": offline, "quantizer": quantizer, "threads": threads}
        found = _of_text(prompt, max_new_tokens, profile, limits, plan, draft_head, options)
    simulation, ran, spans, drafted = found
    if trace is not None:
        from hetero_ee.runtime.trace import write_trace

        write_trace(trace, spans, f"simulated: {simulation.hardware}")
    print(_document(simulation, ran, drafted) if as_json else _report(simulation, ran, drafted))


def _of_shapes(
    name: str,
    model: str | None,
    profile: "HardwareProfile",
    limits: "Limits",
    plan: "Plan | None",
    counts: tuple[int, int],
) -> Found:
    from hetero_ee.decoding.simulation import of_shapes
    from hetero_ee.errors import UsageError
    from hetero_ee.planning.planner import check_fits
    from hetero_ee.planning.planner import plan as make_plan
    from hetero_ee_cli.options.planning import model_spec

    spec, _, _ = model_spec(model, name, True, lambda stage, done, in_all: None)
    ran = plan or make_plan(spec, profile, limits, predict_at_tokens=counts[0] + counts[1] // 2)
    check_fits(ran, spec)
    if ran.mode != "full":
        raise UsageError("random weights write no text that drafts could come true in; take a plan in full mode.")
    simulation, spans = of_shapes(spec, ran, profile, *counts)
    return simulation, ran, spans, None


def _of_text(
    prompt: str,
    max_new_tokens: int,
    profile: "HardwareProfile",
    limits: "Limits",
    plan: "Plan | None",
    draft_head: Path | None,
    flags: dict[str, Any],
) -> Found:
    with ending_at_once():
        from hetero_ee.engine import Engine
    from hetero_ee.decoding.simulation import of_text
    from hetero_ee_cli.options.engine import engine_options
    from hetero_ee_cli.terminal.progress import stage_progress

    options = engine_options(revision=None, ctx_size=limits.context_tokens, **flags)
    with (
        stage_progress() as progress,
        Engine.from_pretrained(
            progress=progress,
            plan=plan,
            profile=profile,
            limits=limits if plan is None else None,
            emulate=True,
            draft_head=draft_head,
            **options,
        ) as engine,
    ):
        result = engine.generate(prompt, max_new_tokens=max_new_tokens)
        ran, asked = engine.plan, engine.placement
        assert ran is not None and asked is not None, "an emulated machine runs a plan"
        simulation = of_text(result, engine.spec, ran, profile, asked.statistics, engine.spans)
        return simulation, ran, engine.spans, _drafted(engine, ran, profile, result.n_prompt_tokens, max_new_tokens)


def _drafted(engine: "Engine", ran: "Plan", profile: "HardwareProfile", n_depth: int, n_new: int) -> Drafted | None:
    """None in full mode."""
    from hetero_ee.planning.times.prediction import predicted_step

    counts, asked = engine.draft_statistics, engine.placement
    if counts is None or asked is None:
        return None
    expected = predicted_step(engine.spec, profile, ran, asked.statistics, n_depth + n_new // 2)
    return Drafted(engine.draft_origin, counts, None if expected is None else expected.tokens)


def _report(simulation: "Simulation", plan: "Plan", drafted: Drafted | None) -> str:
    from hetero_ee.runtime.trace import TITLES

    derived = ", derived from data sheets" if simulation.hardware_kind == "derived" else ""
    rows = [
        ("prompt", simulation.n_prompt_tokens, simulation.prompt_s, simulation.predicted_prompt_s),
        ("text", simulation.n_generated_tokens - 1, simulation.generation_s, simulation.predicted_generation_s),
    ]
    lines = [] if simulation.text is None else [simulation.text, ""]
    lines.append(f"SIMULATED on {simulation.hardware}{derived}: {plan.gpu_layers} layers on the GPU, {plan.mode} mode")
    for name, n_tokens, seconds, predicted_s in rows:
        rate = n_tokens / seconds if seconds else 0.0
        expected = "" if predicted_s is None else f"   predicted {1e3 * predicted_s:.2f} ms"
        lines.append(f"{name:8}{n_tokens:6} tok {1e3 * seconds:10.2f} ms {rate:10.1f} t/s{expected}")
    if drafted is not None:
        predicted = drafted.predicted_tokens_per_pass
        expected = "" if predicted is None else f"   predicted {predicted:.1f} tok/pass"
        words = f"{drafted.origin}, {plan.draft_length} rows: {draft_words(drafted.counts)}"
        lines.append(f"{'drafts':8}{words}{expected}")
    for lane in simulation.lanes:
        if lane.prompt_s or lane.generation_s:
            of_prompt, of_text = lane.prompt_s / simulation.prompt_s, lane.generation_s / (simulation.generation_s or 1)
            lines.append(f"{TITLES[lane.lane]:20} busy {of_prompt:4.0%} of the prompt, {of_text:4.0%} of the text")
    return "\n".join(lines)


def _document(simulation: "Simulation", plan: "Plan", drafted: Drafted | None) -> str:
    from dataclasses import asdict

    from hetero_ee import __version__

    return json.dumps(
        {
            "schema": 1,
            "version": __version__,
            "simulated": True,
            **asdict(simulation),
            "mode": plan.mode,
            "exit_layer": plan.exit_layer,
            "draft_length": plan.draft_length,
            "drafts": None if drafted is None else drafts_document(drafted.counts),
            "predicted_tokens_per_pass": None if drafted is None else drafted.predicted_tokens_per_pass,
            "gpu_layers": plan.gpu_layers,
            "prompt_tokens_per_s": simulation.prompt_tokens_per_s,
            "generated_tokens_per_s": simulation.generated_tokens_per_s,
        }
    )
