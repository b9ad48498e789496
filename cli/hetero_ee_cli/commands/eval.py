"""`hetero-ee eval`: compares modes on a text, their speed and how they change the output."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee.config import Progress
from hetero_ee.config.settings import read_settings
from hetero_ee.errors import UsageError, meant, shown
from hetero_ee.options.engine import (
    CERTIFIED,
    MODEL_OPTIONS,
    MODES,
    N_PROMPT_TOKENS,
    N_PROMPTS,
    OFF,
    PLAN_OPTIONS,
    PROFILE,
)
from hetero_ee.options.sampling import SAMPLING
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import Json, hardware_names, model_names, one_of, with_options
from hetero_ee_cli.options.placement import LimitOptions, Placed, PlacementOptions, open_engine
from hetero_ee_cli.options.sampling import LENGTH_FLAGS
from hetero_ee_cli.reports.comparison_report import comparison_document, comparison_table
from hetero_ee_cli.reports.eval_report import INTERVALS, eval_rows, eval_table, save_eval_plot
from hetero_ee_cli.terminal.output import encodable, print_document, printable, say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.evaluation.material import Material
    from hetero_ee.evaluation.open_mode import EngineMode, Variant
    from hetero_ee.evaluation.run import ModeResult
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee_profiles.hardware import HardwareProfile

STANDARD_INPUT = "-"
USUAL_MODES = "full,exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options for the modes to compare, the texts, and the output."""

    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="A",
            help="Compare the weights of MODEL with those of this store or checkpoint, instead of modes.",
            autocompletion=model_names,
        ),
    ] = None
    tokens: Annotated[int, typer.Option(min=64, max=2**24, help="Tokens of the text for --compare.")] = 8192
    text: Annotated[
        Path | None,
        typer.Option(
            help="Held-out text, - for standard input; lines of <|endoftext|> end its documents. [default: full mode's "
            "own, after short openings]"
        ),
    ] = None
    mode: Annotated[
        str,
        typer.Option(
            "--modes",
            "--mode",
            help="Modes to compare with full mode, separated by commas.",
            autocompletion=one_of(MODES),
        ),
    ] = USUAL_MODES
    risk: Annotated[
        str | None, typer.Option(help="For mode certified, one or several, like 0.01,0.05. [default: 0.05]")
    ] = None
    n_prompts: Annotated[int, typer.Option(*N_PROMPTS.flags, min=1, max=N_PROMPTS.most, help=N_PROMPTS.help)] = 16
    n_prompt_tokens: Annotated[
        int, typer.Option(*N_PROMPT_TOKENS.flags, min=1, max=N_PROMPT_TOKENS.most, help=N_PROMPT_TOKENS.help)
    ] = 16
    max_new_tokens: Annotated[
        int, typer.Option(*LENGTH_FLAGS, min=2, max=2**20, help="Tokens to generate, and to score, after each.")
    ] = 128
    seed: Annotated[int, typer.Option("-s", "--seed", min=0, help="Of own held-out texts, and of the intervals.")] = 0
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Emulate this machine, a shipped profile or a profile's JSON file. [default: run on this one]",
            autocompletion=hardware_names,
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(help="Plot speed against quality to a PNG or SVG file; needs the extra [plot].")
    ] = None
    as_json: Json = False

    def held_out(self) -> tuple[str | None, str]:
        """Return the text of --text and its name for people, or None and an empty name without --text."""
        if self.text is None:
            return None, ""
        is_input = str(self.text) == STANDARD_INPUT
        content = read_text("text", None if is_input else self.text)
        return content, "standard input" if is_input else printable(self.text.name)

    def material(self, spec: "ModelSpec", folder: Path, content: str | None, name: str) -> "Material":
        """Return the texts for evaluation: chunks of the content, or openings that the model continues."""
        from hetero_ee.evaluation.material import of_text, of_the_model
        from hetero_ee.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder, spec.vocab_size)
        if content is None:
            return of_the_model(tokenizer, self.n_prompts)
        return of_text(tokenizer, content, self.n_prompts, self.n_prompt_tokens, self.max_new_tokens, name)

    def variants(self, usual: "Limits") -> "dict[Variant, Limits]":
        """Return the modes, full mode first, with the limits for the plan of each."""
        from hetero_ee.evaluation.open_mode import FULL, Variant

        names = [FULL, *self._modes()]
        risks: Sequence[float | None] = [None] if self.risk is None else _risks(self.risk)
        if self.risk is not None and CERTIFIED not in names:
            raise UsageError(PLAN_OPTIONS["risk"], f" is of mode {CERTIFIED}; drop it, or add that mode.")
        return {
            Variant(name, share): replace(usual, mode=name, risk=share)
            for name in names
            for share in (risks if name == CERTIFIED else [None])
        }

    def _modes(self) -> list[str]:
        names = [word.strip() for word in self.mode.split(",")]
        for name in names:
            if name not in MODES:
                raise UsageError(f"--modes is {shown(self.mode)} and {shown(name)} is none; {meant(name, MODES)}")
        return names


def _risks(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        expected = "expected shares of tokens separated by commas, like 0.05."
        raise UsageError(PLAN_OPTIONS["risk"], f" is {shown(text)}; {expected}") from error


@with_options(without={"mode": "it compares several --modes", "risk": "it compares several"})
def eval(wanted: EvalOptions, limits: LimitOptions, engine: ModelOptions, model: ModelArgument = None) -> None:
    """Run modes on the same texts and show how fast each is and what it changes, with intervals over the texts.

    Texts are greedy and as long as --max-tokens says, whatever ends them. Same until: tokens before the first that is
    not full mode's. Perplexity and KL divergence from full mode are of held-out text, with the keys and values that
    the mode leaves behind. CPU passes: how often the CPU's layers are passed, for each token.

    --compare A B shows how far B's weights move predictions away from A's, both computed in fp32.
    """
    with ending_at_once():
        from hetero_ee.evaluation.run import Refused, evaluate
        from hetero_ee.planning.hardware import hardware_from
        from hetero_ee_cli.reports.picture import picture_format, require_matplotlib
    if wanted.plot is not None:
        picture_format(wanted.plot)  # refused now, not after minutes of work
        require_matplotlib()
    if wanted.hardware is not None and PROFILE.name in engine.given:
        raise UsageError(PROFILE, " is for this machine and --hardware names another; drop one of them.")
    if wanted.compare is not None:
        _compare(wanted, wanted.compare, engine, model)
        return
    variants = wanted.variants(limits.limits(engine))
    profile = None if wanted.hardware is None else hardware_from(wanted.hardware)
    content, text_name = wanted.held_out()
    with stage_progress() as progress:
        spec, model_name, folder = engine.model_spec(model, None, progress)
        assert folder is not None, "only random weights have none"
        material = wanted.material(spec, folder, content, text_name)
        longest = max(map(len, material.prompts)) + wanted.max_new_tokens
        opening = _Opening(engine, model, variants, profile, next(iter(limits.flags()), ""), longest, progress)
        found: list[ModeResult] = []
        refused: list[Refused] = []
        way = list(variants), opening.mode, wanted.max_new_tokens
        for result in evaluate(material, *way, seed=wanted.seed, progress=progress):
            if isinstance(result, Refused):
                progress(f"{result.variant.name} is left out: {result.reason}", 0, 0)
                refused.append(result)
            else:
                found.append(result)
    sizes = f"{wanted.n_prompts} texts of {wanted.max_new_tokens} tokens"
    title = f"{printable(model_name)}, {sizes}, {material.description}"
    if profile is not None:
        title += f", emulated on {profile.name}"
    if wanted.plot is not None:
        save_eval_plot(found, title, wanted.plot)
    if wanted.as_json:
        emulated = None if profile is None else profile.name
        document: dict[str, Any] = {"model": model_name, "text": material.description, "emulated": emulated}
        document |= {"n_prompts": wanted.n_prompts, "n_new_tokens": wanted.max_new_tokens, "seed": wanted.seed}
        print_document(document | {"modes": eval_rows([*found, *refused])}, with_version=True)
    else:
        print(f"{title}\n{eval_table(found, encodable(INTERVALS[0], '+-'))}")
        say(f"[ {INTERVALS} ]")


def _compare(wanted: EvalOptions, name_a: str, engine: ModelOptions, model: str | None) -> None:
    """Compare the weights of two models and print the result."""
    others = [flag for flag in ("hardware", "plot", "risk") if getattr(wanted, flag) is not None]
    if others := others + ["modes"] * (wanted.mode != USUAL_MODES):
        raise UsageError(f"--compare compares weights and runs no modes; leave out --{others[0]}.")
    with ending_at_once():
        from hetero_ee.evaluation.comparison import compare
        from hetero_ee.weights.store.library import model_folder
    from hetero_ee.config import cache_folder
    from hetero_ee.hub.model_id import model_name

    content, text_name = wanted.held_out()
    options = engine.arguments(model)
    with stage_progress() as progress:
        a = model_folder(name_a, cache_folder(), offline=options["offline"], progress=progress)
        b = engine.model_folder(model, progress)
        how = {"n_tokens": wanted.tokens, "threads": options["threads"], "seed": wanted.seed}
        found = compare(a, b, None if content is None else [content], **how, progress=progress)
    names = model_name(a), model_name(b), text_name or "text that a model wrote"
    if wanted.as_json:
        print_document(comparison_document(*names, found), with_version=True)
        return
    name_a, name_b, text_name = map(printable, names)
    print(f"A: {name_a}, B: {name_b}, {found.n_tokens:,} tokens of {text_name}")
    print(comparison_table(found, encodable(INTERVALS[0], "+-")))
    say(f"[ {INTERVALS} ]")


@dataclass(frozen=True, slots=True)
class _Opening:
    """Options with which the modes are opened, one after another."""

    engine: ModelOptions
    model: str | None
    limits: "dict[Variant, Limits]"
    hardware: "HardwareProfile | None"
    asking: str  # the first option that needs a plan, empty if there isn't one
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
