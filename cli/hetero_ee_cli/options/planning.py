"""Options that say what the planner may use, and which machine it plans for."""

import re
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from hetero_ee.errors import UsageError, shown
from hetero_ee.options.engine import PLAN_OPTIONS
from hetero_ee_cli.options.completion import hardware_names
from hetero_ee_cli.options.engine import ModelOptions
from hetero_ee_cli.options.flags import OptionGroup, one_of
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.planning.limits import Limits

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


class LimitOptions(OptionGroup):
    """Limits and pins of a plan. Those that are not given are the planner's choice."""

    PANEL: ClassVar = "Placement"
    OPTIONS: ClassVar = PLAN_OPTIONS
    COMPLETIONS: ClassVar = {"gpu_layers": one_of(("auto", "all"))}

    def flags(self) -> list[str]:
        """Return the flags that were given."""
        return [self.OPTIONS[name].flag for name in self.given]

    def limits(self, model: ModelOptions) -> "Limits":
        """Return the limits, with the context size and the threads.

        Raises:
            UsageError: if a value is impossible.
        """
        with ending_at_once():
            from hetero_ee.costs.kv_types import default_kv_type
            from hetero_ee.planning.limits import Limits

        opening, given = model.arguments(), dict(self.given)
        if "gpu_layers" in given:
            given["gpu_layers"] = _layers(given["gpu_layers"])
        if "override" in given:
            given["override"] = [_with_our_device(text) for text in given["override"]]
        same = {name: opening[name] for name in ("context_tokens", "threads")}
        return Limits.of({"kv_type": default_kv_type(opening["quantizer"])} | given | same)


def _layers(text: str) -> int | None:
    """Return the number of layers that -ngl asks for, None to leave it to the planner."""
    if text in LAYER_WORDS:
        return LAYER_WORDS[text]
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise UsageError(PLAN_OPTIONS["gpu_layers"], f" is {shown(text)}; expected a number of layers, all or auto.")
    return int(text)


def _with_our_device(override: str) -> str:
    """Return the override with our names for the devices that other tools call CPU and CUDA0."""
    pattern, equals, device = override.rpartition("=")
    return f"{pattern}{equals}{DEVICE_WORDS.get(device.lower(), device)}"
