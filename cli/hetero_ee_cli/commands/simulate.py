"""`hetero-ee simulate`: the time of a prompt on another machine, with the model's real tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee.errors import UsageError
from hetero_ee.options.sampling import SAMPLING
from hetero_ee_cli.commands.chat import ChatOptions
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions, RandomWeights
from hetero_ee_cli.options.flags import Json, hardware_names, with_options
from hetero_ee_cli.options.placement import LimitOptions, Placed, PlacementOptions
from hetero_ee_cli.options.prompt import PromptArgument, PromptOptions
from hetero_ee_cli.options.sampling import SamplingOptions
from hetero_ee_cli.reports.run_report import draft_words, exit_words, lane_lines, run_document, traffic_lines
from hetero_ee_cli.terminal.output import print_document, printable, say, table
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.decoding.simulation import Simulation
    from hetero_ee.engine import Engine
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.plan import Plan
    from hetero_ee.runtime.devices.timeline import Span
    from hetero_ee.runtime.devices.traffic import TextTraffic
    from hetero_ee.speculation.statistics import DraftStatistics, ExitStatistics
    from hetero_ee_profiles.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A simulation, with its plan and draft statistics."""

    simulation: "Simulation"
    plan: "Plan"
    spans: "list[Span]"
    drafts: "DraftStatistics | None" = None  # None in full mode
    draft_origin: str = ""
    predicted_tokens_per_pass: float | None = None  # None if the acceptance of drafts is unknown
    exits: "ExitStatistics | None" = None  # None except in early-exit modes
    traffic: "TextTraffic | None" = None


DEFAULT_PROMPT = "Once upon a time"
USUAL: dict[str, Any] = {"max_new_tokens": 64, "seed": 0}  # a simulation can be repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options that choose the machine, the lengths and the output format, and the argument PROMPT."""

    argument: PromptArgument = None
    hardware: Annotated[
        str, typer.Option(help="Shipped profile to simulate, or a profile's JSON file.", autocompletion=hardware_names)
    ] = "rtx-4060-laptop-8gb"
    random_weights: RandomWeights = None
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=2**20, help="Length of the prompt, with --random-weights.")
    ] = 512
    as_json: Json = False


@with_options(
    without={
        "profile": "--hardware names the machine to simulate",
        "stats": "what --stats shows is always shown",
        "verbose": "what -v shows is always shown",
    }
)
def simulate(
    wanted: SimulateOptions,
    prompts: PromptOptions,
    conversation: ChatOptions,
    sampling: SamplingOptions,
    limits: LimitOptions,
    placement: PlacementOptions,
    engine: ModelOptions,
    model: ModelArgument = None,
) -> None:
    """Run a prompt through the real model as another machine would: the same tokens, and the time they take there.

    As with hetero-ee run, a model with a chat template answers the prompt. Without a prompt, the text begins with
    "Once upon a time". Texts have up to 64 tokens unless -n is given, and the seed is 0 unless --seed is.
    Nothing printed is a measurement of that machine. With --random-weights nothing is computed; there are only times.
    """
    from hetero_ee.planning.hardware import hardware_from

    model, argument = engine.model_and_prompt(model, wanted.argument)
    changes = _changes(replace(wanted, argument=argument), prompts, sampling)
    placed = placement.checked(limits, engine)
    profile = hardware_from(wanted.hardware)
    if placed.plan is not None and placed.plan.hardware != profile.name:
        say(f"The plan was made for {printable(placed.plan.hardware)}; here it runs on {profile.name}.")
    if wanted.random_weights is None:
        text, template = prompts.given(argument), conversation.template()
        with _emulated(profile, placed, engine, model) as opened:
            found = _simulated(opened, _generated(opened, text, conversation.system, template, changes))
    else:
        spec, _, _ = engine.model_spec(model, wanted.random_weights, lambda *_: None)
        found = _of_shapes(spec, profile, placed, (wanted.prompt_tokens, changes["max_new_tokens"]))
    placement.write_trace(found.spans, f"simulated: {found.simulation.hardware}")
    if wanted.as_json:
        print_document(_document(found), with_version=True)
    else:
        print(_report(found))


def _changes(wanted: SimulateOptions, prompts: PromptOptions, sampling: SamplingOptions) -> dict[str, Any]:
    """Return the sampling options to use.

    Raises:
        UsageError: if a prompt or a sampling option other than the length is given for random weights.
    """
    changes = USUAL | sampling.changes(escapes=prompts.escape)
    if wanted.random_weights is None:
        return changes if "seed" in sampling.given else changes | {"seed": USUAL["seed"]}
    if (wanted.argument, prompts.prompt, prompts.file) != (None, None, None):
        raise UsageError("random weights read no prompt; set its length with --prompt-tokens, or name a model.")
    others = [sampling.OPTIONS[name] for name in sampling.given if name != "max_new_tokens"]
    if others:
        raise UsageError("random weights choose no tokens; drop ", others[0], ", or name a model.")
    if changes["max_new_tokens"] is None:
        raise UsageError("random weights never end a text; give its length with ", SAMPLING["max_new_tokens"], ".")
    return changes


def _of_shapes(spec: "ModelSpec", profile: "HardwareProfile", placed: Placed, counts: tuple[int, int]) -> _Simulated:
    """Simulate a model with random weights. `counts` has the numbers of tokens of the prompt and the text."""
    from hetero_ee.decoding.simulation import of_shapes
    from hetero_ee.planning.context import grown
    from hetero_ee.planning.planner import check_fits
    from hetero_ee.planning.planner import plan as make_plan

    def planned(context_tokens: int) -> "Plan":
        limits = replace(placed.limits, context_tokens=context_tokens)
        return make_plan(spec, profile, limits, predict_at_tokens=counts[0] + counts[1] // 2)

    ran = placed.plan or planned(placed.limits.context_tokens)
    if placed.plan is None and not placed.limits.context_tokens and sum(counts) > ran.context_tokens:
        ran = grown(planned, ran.context_tokens, sum(counts), spec.max_context_tokens) or ran
    check_fits(ran, spec)
    if ran.mode != "full":
        raise UsageError("random weights produce no text to verify drafts against; use a plan in full mode.")
    simulation, spans = of_shapes(spec, ran, profile, *counts)
    return _Simulated(simulation, ran, spans)


@contextmanager
def _emulated(
    profile: "HardwareProfile", placed: Placed, options: ModelOptions, model: str | None
) -> "Iterator[Engine]":
    """Open the model in an engine that emulates the profile's machine."""
    with ending_at_once():
        from hetero_ee.engine import Engine
    from hetero_ee_profiles.host.process import physical_core_count

    arguments = options.arguments(model)
    with (
        stage_progress() as progress,
        Engine.from_pretrained(
            progress=progress,
            plan=placed.plan,
            profile=profile,
            limits=placed.limits if placed.plan is None else None,
            emulate=True,
            draft_head=placed.options.draft_head,
            draft_model=placed.options.draft_model,
            **arguments | {"threads": min(arguments["threads"], physical_core_count())},  # of this machine
        ) as engine,
    ):
        yield engine


def _generated(
    engine: "Engine", prompt: str | None, system: str | None, template: str | None, changes: dict[str, Any]
) -> "GenerationResult":
    """Return the model's answer to the prompt, or the text that continues it if there is no chat template."""
    if prompt is None or (template is None and not engine.has_chat_template):
        return engine.generate(DEFAULT_PROMPT if prompt is None else prompt, **changes)
    with engine.chat(system, chat_template=template, **changes) as talk:
        return talk.send(prompt).finish()


def _simulated(engine: "Engine", result: "GenerationResult") -> _Simulated:
    """Return the simulated and the predicted times of the first text that an emulating engine generated."""
    from hetero_ee.decoding.simulation import simulated
    from hetero_ee.planning.times.prediction import predicted_step

    ran, request, spans = engine.plan, engine.plan_request, engine.spans
    assert ran is not None and request is not None and request.profile is not None, "an emulated machine runs a plan"
    known = engine.spec, ran, request.profile, request.statistics
    counts = result.n_prompt_tokens, result.n_generated_tokens
    simulation = simulated(*known, spans, counts, (result.prompt_s, result.generation_s), result.text)
    if engine.draft_statistics is None:
        return _Simulated(simulation, ran, spans, exits=engine.exit_statistics, traffic=engine.traffic)
    step = predicted_step(engine.spec, request.profile, ran, request.statistics, counts[0] + counts[1] // 2)
    predicted = None if step is None else step.tokens
    drafts = engine.draft_statistics, engine.draft_origin, predicted
    return _Simulated(simulation, ran, spans, *drafts, traffic=engine.traffic)


def _report(found: _Simulated) -> str:
    simulation, plan = found.simulation, found.plan
    derived = ", derived from data sheets" if simulation.hardware_kind == "derived" else ""
    lines = [] if simulation.text is None else [simulation.text, ""]
    lines.append(f"SIMULATED on {simulation.hardware}{derived}: {_on_gpu(plan)} on the GPU, {plan.mode} mode")
    # Simulated times differ from predicted ones only by the text's own drafts and exits; without them, show one column.
    times: tuple[str, ...] = ("predicted ms", "tokens/s")
    if found.drafts is not None or found.exits is not None:
        times = ("with its drafts ms", "tokens/s", *times)
    rows = [("", "tokens", *times)]
    for name, n_tokens, seconds, predicted_s in (
        ("prompt", simulation.n_prompt_tokens, simulation.prompt_s, simulation.predicted_prompt_s),
        ("text", simulation.n_generated_tokens - 1, simulation.generation_s, simulation.predicted_generation_s),
    ):
        cells = [cell for each in (seconds, predicted_s) for cell in _time_and_rate(n_tokens, each)]
        rows.append((name, str(n_tokens), *cells[: len(times)]))
    lines.append(table(rows, numbers_from=1))
    if found.drafts is not None:
        predicted = found.predicted_tokens_per_pass
        expected = "" if predicted is None else f"   predicted {predicted:.1f} tok/pass"
        words = f"{found.draft_origin}, up to {plan.draft_length} tokens: {draft_words(found.drafts)}"
        lines.append(f"{'drafts':8}{words}{expected}")
    if found.exits is not None:
        lines.append(f"{'exits':8}{exit_words(found.exits)}")
    lines += lane_lines(simulation.lanes, simulation.prompt_s, simulation.generation_s)
    return "\n".join([*lines, *([] if found.traffic is None else traffic_lines(plan, found.traffic))])


def _on_gpu(plan: "Plan") -> str:
    """Describe the layers on the GPU: whole layers, single parts, and FFNs with some neurons on the GPU."""

    kinds = {
        kind: sum(part.decode_placement == "gpu" for part in plan.parts if part.name.endswith(f".{kind}"))
        for kind in ("attention", "ffn")
    }
    n_whole = plan.gpu_layers
    partly = [f"{n - n_whole} layers' {kind}" for kind, n in kinds.items() if n > n_whole]
    n_split = sum(placement.is_split for placement in plan.decode_placements)
    partly += [f"hot neurons of {n_split} FFNs"] if n_split else []
    return " and ".join([f"{n_whole} {'whole ' if partly else ''}layers", *partly])


def _time_and_rate(n_tokens: int, seconds: float | None) -> tuple[str, str]:
    """Return the time in milliseconds and the tokens per second, as text."""
    if seconds is None:
        return "-", "-"
    return f"{1e3 * seconds:.2f}", f"{n_tokens / seconds if seconds else 0.0:.1f}"


def _document(found: _Simulated) -> dict[str, Any]:
    simulation = found.simulation
    return {
        "simulated": True,
        **asdict(simulation),
        **run_document(found.plan, found.drafts, found.exits, found.traffic),
        "predicted_tokens_per_pass": found.predicted_tokens_per_pass,
        "prompt_tokens_per_s": simulation.prompt_tokens_per_s,
        "generated_tokens_per_s": simulation.generated_tokens_per_s,
    }
