"""`hetero-ee generate`: a prompt in, text out as it is generated."""

import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hetero_ee_cli.options.constraint import ConstraintOptions
from hetero_ee_cli.options.engine import ModelOptions
from hetero_ee_cli.options.flags import Json, with_options
from hetero_ee_cli.options.placement import PlacementOptions, open_engine
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.options.prompt import PromptArgument, PromptOptions
from hetero_ee_cli.options.sampling import SamplingOptions
from hetero_ee_cli.reports.expectation import expected_rate
from hetero_ee_cli.reports.run_report import Closing, closing_lines, run_document
from hetero_ee_cli.terminal.output import print_document, print_tokens, say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.engine import Engine

COUNTS = (
    *("n_prompt_tokens", "n_generated_tokens", "prompt_s", "generation_s"),
    *("prompt_tokens_per_s", "generated_tokens_per_s"),
)


@with_options()
def generate(
    engine: ModelOptions,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    constraint: ConstraintOptions,
    limits: LimitOptions,
    placement: PlacementOptions,
    argument: PromptArgument = None,
    as_json: Json = False,
) -> None:
    """Generate text. Only the text goes to standard output; progress and a closing line go to standard error."""
    text = prompts.required(argument)
    placed = placement.checked(limits, engine)
    options, changes = engine.arguments(), sampling.changes() | constraint.changes()
    start_s = time.perf_counter()
    with stage_progress() as progress, open_engine(options, placed, progress) as opened:
        load_s = time.perf_counter() - start_s
        try:
            Continuing(opened, options["model"], changes, placement, load_s).write(text, as_json)
        finally:
            placement.write_trace_of(opened)


@dataclass(frozen=True, slots=True)
class Continuing:
    """A model that continues texts."""

    engine: "Engine"
    model: str | None  # as the user named it
    changes: dict[str, Any]  # of the model's sampling
    placement: PlacementOptions
    load_s: float  # what opening it took

    def write(self, text: str, as_json: bool = False) -> None:
        """Print the continuation of `text`, and its report.

        Raises:
            KeyboardInterrupt: at the end, if Ctrl-C was pressed.
        """
        with ending_at_once():
            from hetero_ee.decoding.result import collect

        engine, start_s = self.engine, time.perf_counter()
        stream = engine.stream(text, **self.changes)
        tokens, interrupted = print_tokens(stream, quiet=as_json, prompt="" if as_json else text)
        result = collect(tokens) if tokens else None
        if as_json:
            document = _document(engine, self.model, self.changes, result, interrupted)
            print_document(document, with_version=True)
        if result is not None:
            is_sampled = engine.default_sampling.changed(**self.changes).temperature > 0
            closing = Closing(
                prompt=str(result.n_prompt_tokens),
                context_tokens=engine.context_tokens,
                seed=self.changes["seed"] if is_sampled else None,
                expected=None if interrupted else expected_rate(engine, result),
                load_s=self.load_s if self.placement.verbose else None,
                stats_from_s=start_s if self.placement.stats else None,
            )
            if sys.stdout.isatty() and not as_json:  # a pipe gets the text alone, which may not end with a newline
                print("\n")
            say(closing_lines(engine, result, closing))
        if interrupted:
            raise KeyboardInterrupt


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
        **run_document(engine.plan, engine.draft_statistics, engine.exit_statistics, engine.traffic),
        "neuron_share": engine.neuron_share,
        "predicted_share": engine.predicted_share,
        "sampling": asdict(engine.default_sampling.changed(**changes)),
        "text": result.text if result else "",
        "token_ids": list(result.token_ids) if result else [],
        "finish_reason": "interrupted" if interrupted or result is None else result.finish_reason.value,
        **{name: getattr(result, name, 0) for name in COUNTS},
        "peak_memory_bytes": peak_memory_bytes(),
    }
