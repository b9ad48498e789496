"""`hetero-ee generate`: continues a prompt and prints the text while it is generated."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hetero_ee_cli.options.engine import ModelOptions
from hetero_ee_cli.options.flags import Json, with_options
from hetero_ee_cli.options.placement import LimitOptions, PlacementOptions, Session, session
from hetero_ee_cli.options.prompt import PromptArgument, PromptOptions
from hetero_ee_cli.options.sampling import SamplingOptions
from hetero_ee_cli.reports.run_report import closing_lines, run_document
from hetero_ee_cli.terminal.output import end_line, print_document, print_tokens, say
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult

COUNTS = (
    *("n_prompt_tokens", "n_generated_tokens", "prompt_s", "generation_s"),
    *("prompt_tokens_per_s", "generated_tokens_per_s"),
)


@with_options()
def generate(
    engine: ModelOptions,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    limits: LimitOptions,
    placement: PlacementOptions,
    argument: PromptArgument = None,
    as_json: Json = False,
) -> None:
    """Generate text. Only the text goes to standard output; progress and a closing line go to standard error."""
    text, changes = prompts.required(argument), sampling.changes(escapes=prompts.escape)
    with session(engine, None, limits, placement) as opened:
        continue_text(opened, text, changes, as_json)


def continue_text(session: Session, text: str, changes: dict[str, Any], as_json: bool = False) -> None:
    """Print the continuation of `text`, followed by a report.

    Raises:
        KeyboardInterrupt: after the report, if Ctrl-C was pressed.
    """
    with ending_at_once():
        from hetero_ee.decoding.result import collect

    engine, start_s = session.engine, time.perf_counter()
    stream = engine.stream(text, **changes)
    tokens, interrupted = print_tokens(stream, quiet=as_json, prompt="" if as_json else text)
    result, sampled = collect(tokens) if tokens else None, engine.default_sampling.changed(**changes)
    if as_json:
        print_document(_document(session, asdict(sampled), result, interrupted), with_version=True)
    if result is not None:
        if not as_json:
            end_line(result.text)
        seed = sampled.seed if sampled.temperature > 0 else None
        prompt = str(result.n_prompt_tokens)
        say(closing_lines(session, result, prompt=prompt, seed=seed, start_s=start_s, is_interrupted=interrupted))
    if interrupted:
        raise KeyboardInterrupt


def _document(
    session: Session, sampling: dict[str, Any], result: "GenerationResult | None", interrupted: bool
) -> dict[str, Any]:
    from hetero_ee_profiles.host.process import peak_memory_bytes

    engine = session.engine
    return {
        "model": session.model or "demo",
        "architecture": engine.spec.architecture,
        "quantizer": engine.quantizer,
        **run_document(engine.plan, engine.draft_statistics, engine.exit_statistics, engine.traffic),
        "neuron_share": engine.neuron_share,
        "predicted_share": engine.predicted_share,
        "sampling": sampling,
        "text": result.text if result else "",
        "token_ids": list(result.token_ids) if result else [],
        "finish_reason": "interrupted" if interrupted or result is None else result.finish_reason.value,
        **{name: getattr(result, name, 0) for name in COUNTS},
        "peak_memory_bytes": peak_memory_bytes(),
    }
