"""Options that say what the planner may use, and which machine it plans for."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_ee.errors import UsageError
from hetero_ee_cli.options.engine import EngineOptions

if TYPE_CHECKING:
    from hetero_ee.planning.limits import Limits

GIB, MIB = 2**30, 2**20
OVERRIDE_HELP = "Pin parts by name: REGEX=gpu, REGEX=cpu or REGEX=stream; can be given more than once."


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits and pins of a plan; None leaves the choice to the planner."""

    vram_budget: Annotated[
        float | None, typer.Option(help="GPU memory to use, in GiB. [default: free memory, less the margin]")
    ] = None
    vram_margin: Annotated[int | None, typer.Option(help="GPU memory to leave free, in MiB. [default: 1024]")] = None
    ram_budget: Annotated[float | None, typer.Option(help="RAM to use, in GiB. [default: free memory]")] = None
    gpu_layers: Annotated[
        int | None,
        typer.Option("-ngl", "--gpu-layers", help="Layers placed whole on the GPU, counted from the first."),
    ] = None
    override: Annotated[list[str] | None, typer.Option("-ot", "--override", help=OVERRIDE_HELP)] = None
    kv_type: Annotated[str | None, typer.Option(help="Type of the KV cache: fp32, fp16 or int8. [default: fp32]")] = (
        None
    )
    mode: Annotated[
        str | None,
        typer.Option(
            help="full: one token per pass; exact: speculative decoding by early exit (self-speculative), a draft head "
            "or n-grams, with the text of full mode. [default: whichever should be faster]"
        ),
    ] = None
    draft_length: Annotated[
        int | None,
        typer.Option(
            "--draft-length",
            "--draft-tokens",
            help="Tokens verified in one pass in exact mode, 1 to 16. [default: what should be fastest]",
        ),
    ] = None

    def given(self) -> list[str]:
        """The flags that were given."""
        return [
            f"--{field.name.replace('_', '-')}" for field in fields(self) if getattr(self, field.name) not in (None, [])
        ]

    def limits(self, engine: EngineOptions) -> "Limits":
        """As the planner takes them, with the context size and the threads. Raises UsageError."""
        from hetero_ee.planning.limits import Limits, parse_override

        opening, usual = engine.arguments(None), Limits()
        return Limits(
            vram_budget_bytes=_bytes_of(self.vram_budget, "--vram-budget"),
            vram_margin_bytes=usual.vram_margin_bytes if self.vram_margin is None else self.vram_margin * MIB,
            ram_budget_bytes=_bytes_of(self.ram_budget, "--ram-budget"),
            gpu_layers=self.gpu_layers,
            overrides=tuple(map(parse_override, self.override or ())),
            context_tokens=opening["context_tokens"],
            kv_type=self.kv_type or usual.kv_type,
            mode=self.mode,
            draft_length=self.draft_length,
            threads=opening["threads"],
        )


def _bytes_of(gib: float | None, flag: str) -> int | None:
    if gib is None:
        return None
    if not 0 <= gib <= 2**20:
        raise UsageError(f"{flag} is {gib}; expected GiB from 0.")
    return int(gib * GIB)
