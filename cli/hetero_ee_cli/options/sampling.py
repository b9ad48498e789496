"""The flags that say how tokens are chosen and when a text ends, for every command that generates."""

import time
from typing import Annotated, Any

import typer

MaxNewTokens = Annotated[
    int | None,
    typer.Option("-n", "--max-new-tokens", help="Tokens to generate. [default: the model's own, else to the end]"),
]
Temp = Annotated[
    float | None, typer.Option("--temp", "--temperature", help="0 is greedy. [default: the model's own, else 0]")
]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's.")]
RepeatPenalty = Annotated[float | None, typer.Option(help="Above 1, tokens already there become less likely.")]
Seed = Annotated[int | None, typer.Option("-s", "--seed", help="Same seed, same text. [default: drawn again]")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string; may be given several times.")]


def sampling_changes(**flags: Any) -> dict[str, Any]:
    """The SamplingParams fields that were given, and a seed in any case. Raises UsageError for impossible values."""
    from hetero_ee_cli.terminal.signals import ending_at_once

    with ending_at_once():
        from hetero_ee.decoding.sampling import SamplingParams

    flags["seed"] = time.time_ns() % 2**32 if flags["seed"] is None else flags["seed"]
    flags["stop"] = tuple(flags["stop"]) if flags["stop"] else None
    changes = {name: value for name, value in flags.items() if value is not None}
    SamplingParams(**changes)  # now, not after a conversion
    return changes
