"""Options that say how tokens are chosen and when a text ends."""

import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The fields of SamplingParams that have an option, by their names there; None keeps the model's own value."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "-n", "--max-new-tokens", help="Tokens to generate. [default: the model's own, else until the text ends]"
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

    def changes(self) -> dict[str, Any]:
        """The fields that were given, and always a seed. Raises UsageError for impossible values."""
        from hetero_ee_cli.terminal.signals import ending_at_once

        with ending_at_once():
            from hetero_ee.decoding.sampling import SamplingParams

        given = asdict(self) | {
            "seed": time.time_ns() % 2**32 if self.seed is None else self.seed,
            "stop": tuple(self.stop) if self.stop else None,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        SamplingParams(**changes)  # checks them now, not after a conversion
        return changes
