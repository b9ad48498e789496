"""The user's limits and pins for a plan. The planner decides only what they leave open."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hetero_ee.errors import UsageError, shown
from hetero_ee.options.engine import (
    CERTIFIED,
    MAX_LAYERS,
    MODEL_OPTIONS,
    N_SEQUENCES,
    OVERRIDES,
    PLAN_OPTIONS,
    RISK,
    RUN_OPTIONS,
    SNAPSHOT_GIB,
    VRAM_MARGIN_GIB,
)
from hetero_ee.options.option import is_whole
from hetero_ee.planning.placement import SPLITS
from hetero_ee_profiles.units import GIB

PLACEMENTS = ("gpu", "cpu", "stream")  # and SPLITS, for sparse FFNs and experts
IN_BYTES = ("vram_budget", "vram_margin", "ram_budget", "snapshot_budget")  # options in GiB
OVERRIDE = PLAN_OPTIONS["override"]
EACH_OVERRIDE = re.compile(r"(.+?=[^=,]+)(?:,|$)")
CHECKED = {
    name: PLAN_OPTIONS[name]
    for name in (
        *("gpu_layers", "n_cpu_moe", "chunk_tokens", "kv_type", "mode"),
        *("draft_length", "draft_tree", "exit_schedule"),
    )
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The user's limits and pins for a plan.

    Raises:
        UsageError: if a value is out of range, or two contradict each other.
    """

    vram_budget_bytes: int | None = None  # None: the free VRAM, less the margin
    vram_margin_bytes: int = int(VRAM_MARGIN_GIB * GIB)
    ram_budget_bytes: int | None = None  # None: the free RAM
    snapshot_budget_bytes: int = int(SNAPSHOT_GIB * GIB)  # of RAM: for copies of state, see KvCache.mark
    # Number of first layers wholly on the GPU, at most all; 0: no GPU; None: the planner decides. Unused without a GPU.
    gpu_layers: int | None = None
    n_cpu_moe: int | None = None  # number of first layers whose experts stay in RAM; None: the planner decides
    # Regular expressions and the placements (see placement.py: gpu, cpu, stream, hot-N) of parts whose whole names they
    # match; the first that matches counts. A part on the CPU may still be read from the disk if RAM is short.
    overrides: tuple[tuple[str, str], ...] = ()
    context_tokens: int = 0  # 0: chosen to fit, and grows when a text needs it, up to the model's own
    kv_type: str | None = None  # None: see costs/kv_types.py
    mode: str | None = None  # None: the planner's choice of "full" and "exact"
    draft_length: int | None = None  # most tokens of a verification, or of a catch-up; None: the planner's choice
    draft_tree: int | None = None  # most drafts after the same token; 1 for chains; None: the planner's choice
    risk: float | None = None  # of mode certified: the share of a prompt's tokens that may differ; None: RISK
    exit_schedule: str | None = None  # of mode specee: one of SCHEDULES; None: BOTH
    chunk_tokens: int | None = None  # tokens of a prompt per pass; None: the planner's choice
    threads: int = 0  # 0: the fastest of those that the profile measured
    n_sequences: int = N_SEQUENCES  # open at a time; they share the context, and each has its own state and windows

    def __post_init__(self) -> None:
        for name in (f"{short}_bytes" for short in IN_BYTES):
            value, is_optional = getattr(self, name), name in ("vram_budget_bytes", "ram_budget_bytes")
            if not (value is None and is_optional) and not is_whole(value, 0):
                raise UsageError(f"{name} is {shown(value)}; expected a whole number from 0.")
        for name in ("context_tokens", "threads"):
            MODEL_OPTIONS[name].check(getattr(self, name))
        for name, option in CHECKED.items():
            if (value := getattr(self, name)) is not None:
                option.check(value)
        RUN_OPTIONS["n_sequences"].check(self.n_sequences)
        check_risk(self.mode, self.risk)
        _check_overrides(self.overrides)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the limits that these options of `Engine.from_pretrained` set. Options that are None set nothing.

        Raises:
            UsageError: if a value is impossible.
        """
        return cls(**dict(_limit(name, value) for name, value in options.items() if value is not None))


def check_risk(mode: str | None, risk: object) -> None:
    """Check that the risk, if given, is between 0 and 1 and the mode is certified.

    Raises:
        UsageError: if it isn't.
    """
    option = PLAN_OPTIONS["risk"]
    if risk is None:
        return
    is_share = isinstance(risk, int | float) and not isinstance(risk, bool) and 0 < risk < 1  # false for NaN
    if not is_share:
        raise UsageError(option, f" is {shown(risk)}; expected a share of tokens above 0 and below 1, like {RISK}.")
    if mode != CERTIFIED:
        raise UsageError(option, f" is of mode {CERTIFIED} and the mode is {mode or 'not given'}; drop ", option, ".")


def override_list(text: str) -> list[str]:
    """Split overrides that are separated by commas, as llama.cpp accepts them."""
    return EACH_OVERRIDE.findall(text) or [text]


def parse_override(text: str) -> tuple[str, str]:
    """Split an override as written on the command line, REGEX=PLACEMENT.

    Raises:
        UsageError: if it is not of that form.
    """
    pattern, equals, placement = text.rpartition("=")
    if not equals:
        raise UsageError(OVERRIDE, f" {shown(text)} has no '='; expected REGEX=gpu, =cpu, =stream or =hot-N.")
    _check_override(pattern, placement)
    return pattern, placement


def _limit(name: str, value: Any) -> tuple[str, Any]:
    """Return the field of Limits that the option `name` sets, and the field's value."""
    if name == OVERRIDE.name:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            expected = "expected REGEX=gpu, REGEX=cpu or REGEX=stream, or a list."
            raise UsageError(OVERRIDE, f" is {shown(value)}; {expected}")
        return OVERRIDES.name, tuple(parse_override(one) for text in texts for one in override_list(text))
    if name == "cpu_moe":
        return "n_cpu_moe", MAX_LAYERS if value else None
    if name not in IN_BYTES:
        return name, value
    PLAN_OPTIONS[name].check(value)
    return f"{name}_bytes", int(value * GIB)


def _check_overrides(overrides: object) -> None:
    if not isinstance(overrides, tuple):
        expected = "expected a tuple of pairs (regular expression, placement)."
        raise UsageError(OVERRIDES, f" is {shown(overrides)}; {expected}")
    for pair in overrides:
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise UsageError(OVERRIDE, f" {shown(pair)} is not a pair (regular expression, placement) of strings.")
        _check_override(*pair)


def _check_override(pattern: str, placement: str) -> None:
    if placement not in (*PLACEMENTS, *SPLITS):
        names = f"{', '.join(PLACEMENTS)}, or {SPLITS[0]} to {SPLITS[-1]} of a sparse FFN or of experts"
        raise UsageError(OVERRIDE, f" {shown(f'{pattern}={placement}')} names no placement; expected one of {names}.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(OVERRIDE, f" {shown(pattern)} is not a regular expression ({error}).") from error
