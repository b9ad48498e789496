"""Options that say what the planner may use, and which machine it plans for."""

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from hetero_ee.errors import UsageError, shown
from hetero_ee_cli.options.completion import KV_TYPES, MODES, hardware_names, one_of
from hetero_ee_cli.options.engine import EngineOptions
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_profiles.units import GIB

if TYPE_CHECKING:
    from hetero_ee.planning.limits import Limits

MAX_GIB = 2**20
ALL_LAYERS = 2**20  # more than any model has
LAYER_WORDS = {"auto": None, "-1": None, "all": ALL_LAYERS, "-2": ALL_LAYERS}  # the numbers as llama.cpp has them
DEVICE_WORDS = {"cpu": "cpu", "cuda0": "gpu", "cuda:0": "gpu"}  # of other tools' overrides

Hardware = Annotated[
    str | None,
    typer.Option(
        help="Shipped profile of the machine, or a profile's JSON file. [default: this machine, measured]",
        autocompletion=hardware_names,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits and pins of a plan; None leaves the choice to the planner."""

    PANEL: ClassVar[str] = "Placement"

    vram_budget: Annotated[
        float | None, typer.Option(help="GPU memory to use, in GiB. [default: free memory, less the margin]")
    ] = None
    vram_margin: Annotated[float | None, typer.Option(help="GPU memory to leave free, in GiB. [default: 1]")] = None
    ram_budget: Annotated[float | None, typer.Option(help="RAM to use, in GiB. [default: free memory]")] = None
    gpu_layers: Annotated[
        str | None,
        typer.Option(
            "-ngl",
            "--gpu-layers",
            "--n-gpu-layers",
            metavar="<int>|all|auto",
            help="Layers placed whole on the GPU, counted from the first; more than the model has are all. "
            "[default: auto]",
            autocompletion=one_of(("auto", "all")),
        ),
    ] = None
    override: Annotated[
        list[str] | None,
        typer.Option(
            "-ot",
            "--override",
            "--override-tensor",
            help="Pin parts by name: REGEX=gpu, =cpu, =stream, or =hot-N of a sparse FFN; can be given more than once.",
        ),
    ] = None
    kv_type: Annotated[
        str | None,
        typer.Option(
            help="Type of the KV cache: fp32, fp16 or int8. [default: fp16; fp32 with --quantizer none]",
            autocompletion=one_of(KV_TYPES),
        ),
    ] = None
    mode: Annotated[
        str | None,
        typer.Option(
            help="full: one token per pass; exact: speculative decoding by early exit (self-speculative), a draft head "
            "or n-grams, with the text of full mode; specee, certified, calm, skipdecode, q-exit, patience, "
            "joint-gate: tokens are given out at early exits, and texts differ. [default: full or exact, whichever "
            "should be faster]",
            autocompletion=one_of(MODES),
        ),
    ] = None
    draft_length: Annotated[
        int | None,
        typer.Option(
            "--draft-length",
            "--draft-tokens",
            help="Tokens verified in one pass in exact mode, or caught up in an early-exit mode, 1 to 16. [default: "
            "what should be fastest]",
        ),
    ] = None
    risk: Annotated[
        float | None,
        typer.Option(help="In mode certified, the share of a prompt's tokens that may differ. [default: 0.05]"),
    ] = None

    def given(self) -> list[str]:
        """The flags that were given."""
        return [
            f"--{field.name.replace('_', '-')}" for field in fields(self) if getattr(self, field.name) not in (None, [])
        ]

    def limits(self, engine: EngineOptions) -> "Limits":
        """As the planner takes them, with the context size and the threads. Raises UsageError."""
        with ending_at_once():
            from hetero_ee.costs.kv_types import default_kv_type
            from hetero_ee.planning.limits import Limits, parse_override

        opening, usual = engine.arguments(), Limits()
        margin_bytes = _bytes_of(self.vram_margin, "vram_margin")
        return Limits(
            vram_budget_bytes=_bytes_of(self.vram_budget, "vram_budget"),
            vram_margin_bytes=usual.vram_margin_bytes if margin_bytes is None else margin_bytes,
            ram_budget_bytes=_bytes_of(self.ram_budget, "ram_budget"),
            gpu_layers=_layers(self.gpu_layers),
            overrides=tuple(parse_override(_with_our_device(text)) for text in self.override or ()),
            context_tokens=opening["context_tokens"],
            kv_type=self.kv_type or default_kv_type(opening["quantizer"]),
            mode=self.mode,
            draft_length=self.draft_length,
            risk=self.risk,
            threads=opening["threads"],
        )


def _layers(text: str | None) -> int | None:
    """What -ngl asks for; None leaves it to the planner."""
    if text is None or text in LAYER_WORDS:
        return None if text is None else LAYER_WORDS[text]
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise UsageError(f"gpu_layers is {shown(text)}; expected a number of layers, all or auto.")
    return int(text)


def _with_our_device(override: str) -> str:
    """REGEX=CPU and REGEX=CUDA0 mean what they mean elsewhere."""
    pattern, equals, device = override.rpartition("=")
    return f"{pattern}{equals}{DEVICE_WORDS.get(device.lower(), device)}"


def _bytes_of(gib: float | None, name: str) -> int | None:
    if gib is None:
        return None
    if not 0 <= gib <= MAX_GIB:
        raise UsageError(f"{name} is {gib:.12g}; expected GiB from 0 to {MAX_GIB}.")
    return int(gib * GIB)
