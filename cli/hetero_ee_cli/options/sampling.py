"""Options that say how tokens are chosen and when a text ends."""

import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import typer

from hetero_ee.errors import UsageError

LENGTH_FLAGS = ("-n", "--max-tokens", "--max-new-tokens", "--n-predict", "--predict")
UNLIMITED = RANDOM = -1  # as llama.cpp has them


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The fields of SamplingParams that have an option, by their names there; None keeps the model's own value."""

    PANEL: ClassVar[str] = "Text"

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            *LENGTH_FLAGS,
            help="Tokens to generate; -1: until the text ends. [default: the model's own, else until the text ends]",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option("--temp", "--temperature", help="0 is greedy. [default: the model's own, else 0]"),
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = None
    top_p: Annotated[
        float | None, typer.Option(help="Keep the smallest set of tokens with this total probability.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens less likely than this fraction of the most likely one.")
    ] = None
    repeat_penalty: Annotated[
        float | None, typer.Option(help="Above 1, makes tokens that have already appeared less likely.")
    ] = None
    seed: Annotated[
        int | None, typer.Option("-s", "--seed", help="The same seed gives the same text. [default: random]")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; can be given more than once.")
    ] = None

    @property
    def has_seed(self) -> bool:
        """Whether each text is to be the same the next time."""
        return self.seed not in (None, RANDOM)

    def changes(self) -> dict[str, Any]:
        """The fields that were given, and always a seed. Raises UsageError for impossible values."""
        if self.stop and "" in self.stop:
            raise UsageError("stop is empty, which every text holds; give the string that ends the text.")
        from hetero_ee_cli.terminal.signals import ending_at_once

        with ending_at_once():
            from hetero_ee.decoding.sampling import SamplingParams

        given = asdict(self) | {
            "seed": self.seed if self.has_seed else new_seed(),
            "stop": tuple(self.stop) if self.stop else None,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        if self.max_new_tokens == UNLIMITED:
            changes["max_new_tokens"] = None
        elif self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(
                f"max_new_tokens is {self.max_new_tokens}; expected a whole number from 1, or -1: until the text ends."
            )
        SamplingParams(**changes)  # checks them now, not after a conversion
        return changes


def new_seed() -> int:
    """One that nobody chose."""
    return time.time_ns() % 2**32
