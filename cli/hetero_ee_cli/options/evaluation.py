"""Options of `hetero-ee eval`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_ee.errors import UsageError, meant, shown
from hetero_ee.options.engine import CERTIFIED, MODES, PLAN_OPTIONS
from hetero_ee.options.evaluation import N_PROMPT_TOKENS, N_PROMPTS
from hetero_ee_cli.options.completion import hardware_names
from hetero_ee_cli.options.flags import Json, one_of
from hetero_ee_cli.options.sampling import LENGTH_FLAGS
from hetero_ee_cli.terminal.output import printable
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.evaluation.material import Material
    from hetero_ee.evaluation.open_mode import Variant
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Which modes are compared, on which texts, and how the result is shown."""

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
    ] = "full,exact"
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
        """Return the text of --text and its name for people; None and an empty name if it was not given."""
        if self.text is None:
            return None, ""
        is_input = str(self.text) == STANDARD_INPUT
        content = read_text("text", None if is_input else self.text)
        return content, "standard input" if is_input else printable(self.text.name)

    def material(self, spec: "ModelSpec", folder: Path, content: str | None, name: str) -> "Material":
        """Return the texts: chunks of the content, or openings for the model to continue.

        Raises:
            UsageError: if there are fewer than --prompts.
        """
        from hetero_ee.evaluation.material import of_text, of_the_model
        from hetero_ee.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder, spec.vocab_size)
        if content is None:
            return of_the_model(tokenizer, self.n_prompts)
        return of_text(tokenizer, content, self.n_prompts, self.n_prompt_tokens, self.max_new_tokens, name)

    def variants(self, usual: "Limits") -> "dict[Variant, Limits]":
        """Return the modes, full mode first, with the limits each is planned by.

        Raises:
            UsageError: if a mode is unknown, or a risk impossible.
        """
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
