"""`hetero-ee generate`: a prompt in, text out as it is generated."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.options.engine import Revision, engine_options
from hetero_ee_cli.options.placement import (
    DraftHead,
    PlacementOptions,
    PlanFile,
    Stats,
    Trace,
    open_engine,
    placement_options,
    write_spans,
)
from hetero_ee_cli.options.planning import (
    DraftTokens,
    GpuLayers,
    KvType,
    Mode,
    Override,
    VramBudget,
    VramMargin,
)
from hetero_ee_cli.options.sampling import (
    MaxNewTokens,
    MinP,
    RepeatPenalty,
    Seed,
    Stop,
    Temp,
    TopK,
    TopP,
    sampling_changes,
)
from hetero_ee_cli.options.settings import CtxSize, Model, Offline, Quantizer, Threads
from hetero_ee_cli.reports.expectation import expected_rate, slowness
from hetero_ee_cli.reports.run_report import mode_words, run_document, statistics_table, uses_gpu
from hetero_ee_cli.terminal.output import closing_line, print_tokens, say
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.engine import Engine

JSON_SCHEMA = 1


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to go on from; - reads it from standard input.")] = None,
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Read the prompt from a file.")] = None,
    max_new_tokens: MaxNewTokens = None,
    temp: Temp = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repeat_penalty: RepeatPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    threads: Threads = None,
    ctx_size: CtxSize = None,
    quantizer: Quantizer = None,
    vram_budget: VramBudget = None,
    vram_margin: VramMargin = None,
    gpu_layers: GpuLayers = None,
    override: Override = None,
    kv_type: KvType = None,
    mode: Mode = None,
    draft_length: DraftTokens = None,
    plan_file: PlanFile = None,
    draft_head: DraftHead = None,
    trace: Trace = None,
    stats: Stats = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document at the end instead of the text.")
    ] = False,
) -> None:
    """Generate text. Only the text goes to standard output; progress and one closing line go to standard error."""
    text = read_prompt(prompt, file)
    placement = placement_options(
        plan_file=plan_file,
        draft_head=draft_head,
        trace=trace,
        stats=stats,
        vram_budget=vram_budget,
        vram_margin=vram_margin,
        gpu_layers=gpu_layers,
        override=override,
        kv_type=kv_type,
        mode=mode,
        draft_length=draft_length,
        ctx_size=ctx_size,
        threads=threads,
    )
    options = engine_options(
        model=model, revision=revision, offline=offline, quantizer=quantizer, ctx_size=ctx_size, threads=threads
    )
    changes = sampling_changes(
        max_new_tokens=max_new_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=stop,
    )
    _generate(text, options, placement, changes, as_json)


def _generate(
    text: str, options: dict[str, Any], placement: PlacementOptions, changes: dict[str, Any], as_json: bool
) -> None:
    """Opens the model, prints the text as it comes, then the closing line."""
    with ending_at_once():
        from hetero_ee.decoding.result import collect
    from hetero_ee_cli.terminal.progress import stage_progress

    with (
        stage_progress() as progress,
        open_engine(options, placement, progress) as engine,
    ):
        start_s = time.perf_counter()
        tokens, interrupted = print_tokens(engine.stream(text, **changes), quiet=as_json)
        result = collect(tokens) if tokens else None
        if as_json:
            print(json.dumps(_document(engine, options["model"], changes, result, interrupted)))
        if result is not None:
            # The text comes first: measuring a machine that was never measured takes some seconds.
            expected = None if interrupted else expected_rate(engine, progress)
            rate = expected(result.n_prompt_tokens, result.n_generated_tokens) if expected else None
            _print_closing_line(result, engine, changes, rate)
            if placement.stats:
                say(statistics_table(engine, result, start_s))
        write_spans(engine, placement)
        if interrupted:
            raise KeyboardInterrupt


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or standard input. Of the last two, one ending newline is dropped."""
    from hetero_ee.errors import UsageError

    if (prompt is None) == (file is None):
        raise UsageError("give one prompt: as an argument, with --file, or - to read standard input.")
    text = _read_prompt(file) if prompt is None or prompt == "-" else prompt
    if not text:
        raise UsageError("the prompt is empty; give some text to go on from.")
    return text


def _read_prompt(file: Path | None) -> str:
    return read_text("prompt", file).removesuffix("\n").removesuffix("\r")


def _print_closing_line(
    result: "GenerationResult", engine: "Engine", changes: dict[str, Any], expected: float | None
) -> None:
    is_sampled = changes.get("temperature", engine.default_sampling.temperature) > 0
    lead = "\n\n" if sys.stdout.isatty() else ""  # the text itself ends where the model ended it
    seed = changes["seed"] if is_sampled else None
    say(lead + closing_line(str(result.n_prompt_tokens), result, seed, expected, mode_words(engine)))
    if (sentence := slowness(result, expected, uses_gpu(engine))) is not None:
        say(sentence)


def _document(
    engine: "Engine",
    model: str | None,
    changes: dict[str, Any],
    result: "GenerationResult | None",
    interrupted: bool,
) -> dict[str, Any]:
    from dataclasses import asdict

    from hetero_ee import __version__
    from hetero_ee_profiles.host.process import peak_memory_bytes

    return {
        "schema": JSON_SCHEMA,
        "version": __version__,
        "model": model or "demo",
        "architecture": engine.spec.architecture,
        "quantizer": engine.quantizer,
        **run_document(engine),
        "sampling": asdict(engine.default_sampling.changed(**changes)),
        "text": result.text if result else "",
        "token_ids": list(result.token_ids) if result else [],
        "finish_reason": "interrupted" if interrupted or result is None else result.finish_reason.value,
        "n_prompt_tokens": result.n_prompt_tokens if result else 0,
        "n_generated_tokens": result.n_generated_tokens if result else 0,
        "prompt_s": result.prompt_s if result else 0.0,
        "generation_s": result.generation_s if result else 0.0,
        "prompt_tokens_per_s": result.prompt_tokens_per_s if result else 0.0,
        "generated_tokens_per_s": result.generated_tokens_per_s if result else 0.0,
        "peak_memory_bytes": peak_memory_bytes(),
    }
