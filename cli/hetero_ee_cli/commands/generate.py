"""`hetero-ee generate`: a prompt in, text out as it is generated."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee.errors import UsageError
from hetero_ee_cli.options.engine import EngineOptions, ModelOption
from hetero_ee_cli.options.flags import Json, with_options
from hetero_ee_cli.options.placement import PlacementOptions, open_engine
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.options.sampling import SamplingOptions
from hetero_ee_cli.reports.expectation import expected_rate
from hetero_ee_cli.reports.run_report import closing_lines, run_document
from hetero_ee_cli.terminal.output import print_document, print_tokens, say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.engine import Engine

COUNTS = (
    *("n_prompt_tokens", "n_generated_tokens", "prompt_s", "generation_s"),
    *("prompt_tokens_per_s", "generated_tokens_per_s"),
)


@with_options()
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    limits: LimitOptions,
    placement: PlacementOptions,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads it from standard input.")] = None,
    model: ModelOption = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Read the prompt from a file.")] = None,
    as_json: Json = False,
) -> None:
    """Generate text. Only the text goes to standard output; progress and a closing line go to standard error."""
    text = read_prompt(prompt, file)
    placed = placement.checked(limits, engine)
    options, changes = engine.arguments(model), sampling.changes()
    with ending_at_once():
        from hetero_ee.decoding.result import collect

    with stage_progress() as progress, open_engine(options, placed, progress) as opened:
        start_s = time.perf_counter()
        tokens, interrupted = print_tokens(opened.stream(text, **changes), quiet=as_json)
        result = collect(tokens) if tokens else None
        if as_json:
            document = _document(opened, options["model"], changes, result, interrupted)
            print_document(document, with_version=True)
        if result is not None:
            is_sampled = opened.default_sampling.changed(**changes).temperature > 0
            lines = closing_lines(
                opened,
                result,
                prompt=str(result.n_prompt_tokens),
                seed=changes["seed"] if is_sampled else None,
                expected=None if interrupted else expected_rate(opened, result),
                stats_from_s=start_s if placement.stats else None,
            )
            say(("\n\n" if sys.stdout.isatty() else "") + lines)  # the text itself may not end with a newline
        placement.write_trace_of(opened)
        if interrupted:
            raise KeyboardInterrupt


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or standard input. One final newline is dropped from the latter two."""
    if (prompt is None) == (file is None):
        raise UsageError("give one prompt: as an argument, with --file, or - to read standard input.")
    text = prompt
    if text is None or text == "-":
        text = read_text("prompt", file).removesuffix("\n").removesuffix("\r")
    if not text:
        raise UsageError("the prompt is empty; give some text to continue.")
    return text


def _document(
    engine: "Engine",
    model: str | None,
    changes: dict[str, Any],
    result: "GenerationResult | None",
    interrupted: bool,
) -> dict[str, Any]:
    from hetero_ee_profiles.host.process import peak_memory_bytes

    return {
        "model": model or "demo",
        "architecture": engine.spec.architecture,
        "quantizer": engine.quantizer,
        **run_document(engine.plan, engine.draft_statistics),
        "sampling": asdict(engine.default_sampling.changed(**changes)),
        "text": result.text if result else "",
        "token_ids": list(result.token_ids) if result else [],
        "finish_reason": "interrupted" if interrupted or result is None else result.finish_reason.value,
        **{name: getattr(result, name, 0) for name in COUNTS},
        "peak_memory_bytes": peak_memory_bytes(),
    }
