"""`hetero-ee eval`: modes side by side on a text, how fast each is and what it changes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee.config import Progress
from hetero_ee.config.settings import read_settings
from hetero_ee.errors import UsageError, meant, shown
from hetero_ee.options.engine import MODEL_OPTIONS, MODES, OFF, PLAN_OPTIONS, PROFILE
from hetero_ee.options.sampling import SAMPLING
from hetero_ee_cli.options.completion import hardware_names
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import Json, one_of, with_options
from hetero_ee_cli.options.placement import Placed, PlacementOptions, open_engine
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.options.sampling import LENGTH_FLAGS
from hetero_ee_cli.reports.eval_report import INTERVALS, eval_rows, eval_table, save_eval_plot
from hetero_ee_cli.terminal.output import encodable, print_document, printable, say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.evaluation.material import Material
    from hetero_ee.evaluation.open_mode import EngineMode, Variant
    from hetero_ee.evaluation.run import ModeResult, Refused
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee_profiles.hardware import HardwareProfile

STANDARD_INPUT = "-"


@with_options(
    without={
        "mode": "its --modes are several",
        "risk": "it takes several",
    }
)
def eval(
    limits: LimitOptions,
    engine: ModelOptions,
    model: ModelArgument = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Held-out text, - for standard input; lines of <|endoftext|> end its documents. [default: full mode's "
            "own, after short openings]"
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            "--modes",
            "--mode",
            help="Modes to compare with full mode, separated by commas.",
            autocompletion=one_of(MODES),
        ),
    ] = "full,exact",
    risk: Annotated[
        str | None, typer.Option(help="Of mode certified, one or several, like 0.01,0.05. [default: 0.05]")
    ] = None,
    n_prompts: Annotated[
        int, typer.Option("--prompts", min=1, max=10_000, help="Texts to generate and to score.")
    ] = 16,
    n_prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, max=2**20, help="Tokens of --text that each begins with.")
    ] = 16,
    max_new_tokens: Annotated[
        int, typer.Option(*LENGTH_FLAGS, min=2, max=2**20, help="Tokens to generate, and to score, after each.")
    ] = 128,
    seed: Annotated[int, typer.Option("-s", "--seed", min=0, help="Of own held-out texts, and of the intervals.")] = 0,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Emulate this machine, a shipped profile or a profile's JSON file. [default: run on this one]",
            autocompletion=hardware_names,
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot speed against quality to a PNG or SVG file; needs the extra [plot].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run modes on the same texts and show how fast each is and what it changes, with intervals over the texts.

    Texts are greedy and as long as --max-tokens says, whatever ends them. Same until: tokens before the first that is
    not full mode's. Perplexity and KL divergence from full mode are of held-out text, with the keys and values that
    the mode leaves behind. CPU passes: how often the CPU's layers are passed, for each token.
    """
    with ending_at_once():
        from hetero_ee.calibration.plot import picture_format, require_matplotlib
        from hetero_ee.planning.hardware import hardware_from
    if plot is not None:
        picture_format(plot)  # refused now, not after minutes of work
        require_matplotlib()
    if hardware is not None and engine.given.get("profile") is not None:
        raise UsageError(PROFILE, " is for this machine and --hardware names another; drop one of them.")
    variants = _variants(mode, risk, limits.limits(engine))
    profile = None if hardware is None else hardware_from(hardware)
    given = None if text is None else read_text("text", None if str(text) == STANDARD_INPUT else text)
    name = "" if text is None else "standard input" if str(text) == STANDARD_INPUT else printable(text.name)
    with stage_progress() as progress:
        spec, model_name, folder = engine.model_spec(model, None, progress)
        assert folder is not None, "only random weights have none"
        material = _material(spec, folder, given, name, (n_prompts, n_prompt_tokens, max_new_tokens))
        longest = max(map(len, material.prompts)) + max_new_tokens
        opening = _Opening(engine, model, variants, profile, next(iter(limits.flags()), ""), longest, progress)
        found, refused = _results(opening, material, max_new_tokens, seed)
    title = f"{printable(model_name)}, {n_prompts} texts of {max_new_tokens} tokens, {material.description}"
    if profile is not None:
        title += f", emulated on {profile.name}"
    if plot is not None:
        save_eval_plot(found, title, plot)
    if as_json:
        emulated = None if profile is None else profile.name
        counts = {"n_prompts": n_prompts, "n_new_tokens": max_new_tokens, "seed": seed}
        document = {"model": model_name, "text": material.description, "emulated": emulated} | counts
        print_document(document | {"modes": eval_rows([*found, *refused])}, with_version=True)
    else:
        print(f"{title}\n{eval_table(found, encodable(INTERVALS[0], '+-'))}")
        say(f"[ {INTERVALS} ]")


@dataclass(frozen=True, slots=True)
class _Opening:
    """What the modes are opened with, one after another."""

    engine: ModelOptions
    model: str | None
    limits: "dict[Variant, Limits]"
    hardware: "HardwareProfile | None"
    asking: str  # the first option that takes a plan, empty where there is none
    least_context_tokens: int
    progress: Progress

    @contextmanager
    def mode(self, variant: "Variant") -> "Iterator[EngineMode]":
        from hetero_ee.evaluation.open_mode import FULL, EngineMode

        options = self._options()
        is_off = (options.get("profile") or read_settings().value("profile")) == OFF
        asking = self.asking or ("" if is_off and variant.mode == FULL else "--modes")  # full mode needs no plan
        made = replace(self.limits[variant], context_tokens=options["context_tokens"])
        placed = Placed(asking, made, None, PlacementOptions())
        with open_engine(options, placed, self.progress) as opened:
            yield EngineMode(opened, emulates=self.hardware is not None)

    def _options(self) -> dict[str, Any]:
        """Arguments of Engine.from_pretrained. Raises UsageError for too small a context."""
        options = self.engine.arguments(self.model)
        asked, needed = options["context_tokens"], self.least_context_tokens
        if asked and asked < needed:
            raise UsageError(
                MODEL_OPTIONS["context_tokens"],
                f" is {asked} and the texts have {needed}; raise it, or lower ",
                SAMPLING["max_new_tokens"],
                ".",
            )
        emulated = {} if self.hardware is None else {"profile": self.hardware, "emulate": True}
        return options | {"context_tokens": asked or needed} | emulated


def _results(
    opening: _Opening, material: "Material", n_new_tokens: int, seed: int
) -> "tuple[list[ModeResult], list[Refused]]":
    """Of the modes that could be opened, and the others."""
    from hetero_ee.evaluation.run import Refused, evaluate

    found: list[ModeResult] = []
    refused: list[Refused] = []
    for result in evaluate(
        material, list(opening.limits), opening.mode, n_new_tokens, seed=seed, progress=opening.progress
    ):
        if isinstance(result, Refused):
            opening.progress(f"{result.variant.name} is left out: {result.reason}", 0, 0)
            refused.append(result)
        else:
            found.append(result)
    return found, refused


def _material(spec: "ModelSpec", folder: Path, text: str | None, name: str, sizes: tuple[int, int, int]) -> "Material":
    """sizes: prompts, tokens of each, tokens behind each."""
    from hetero_ee.evaluation.material import of_text, of_the_model
    from hetero_ee.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder, spec.vocab_size)
    return of_the_model(tokenizer, sizes[0]) if text is None else of_text(tokenizer, text, *sizes, name)


def _variants(modes: str, risk: str | None, usual: "Limits") -> "dict[Variant, Limits]":
    """With the limits that each is planned by; full mode first. Raises UsageError for what is no mode."""
    from hetero_ee.evaluation.open_mode import FULL, Variant
    from hetero_ee.options.engine import CERTIFIED

    names = [FULL, *_names("modes", modes, MODES)]
    risks: Sequence[float | None] = [None] if risk is None else _risks(risk)
    if risk is not None and CERTIFIED not in names:
        raise UsageError(PLAN_OPTIONS["risk"], f" is of mode {CERTIFIED}; drop it, or add that mode.")
    found: dict[Variant, Limits] = {}
    for name in names:
        for share in risks if name == CERTIFIED else [None]:
            found[Variant(name, share)] = replace(usual, mode=name, risk=share)
    return found


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Separated by commas. Raises UsageError for one that is not known."""
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"--{option} is {shown(text)} and {shown(name)} is none; {meant(name, known)}")
    return names


def _risks(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        option = PLAN_OPTIONS["risk"]
        expected = "expected shares of tokens separated by commas, like 0.05."
        raise UsageError(option, f" is {shown(text)}; {expected}") from error
