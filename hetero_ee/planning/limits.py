"""What the user allows and pins; the planner fills only what is unset."""

import re
from dataclasses import dataclass

from hetero_ee.errors import UsageError, shown
from hetero_ee.planning.parts import KV_BYTES

PLACES = ("gpu", "cpu", "stream")
MODES = ("full", "exact")
MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """vram_budget_bytes, ram_budget_bytes: None for what is free, of the GPU's less the margin.

    gpu_layers: whole layers on the GPU, counted from the first, 0 for no GPU at all; None lets the planner choose.
    overrides: pairs of a regular expression and a place ("gpu", "cpu" or "stream") for the parts whose names it matches
    wholly; of several that match the first counts. A part on the CPU may still be read from the disk, if RAM is short.
    context_tokens: 0 for the model's own. mode: "full" or "exact", draft_tokens: rows in one pass of verification; None
    lets the planner choose. threads: 0 for all. Raises UsageError.
    """

    vram_budget_bytes: int | None = None
    vram_margin_bytes: int = 2**30
    ram_budget_bytes: int | None = None
    gpu_layers: int | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    context_tokens: int = 0
    kv_type: str = "fp32"
    mode: str | None = None
    draft_tokens: int | None = None
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("vram_budget_bytes", "vram_margin_bytes", "ram_budget_bytes", "gpu_layers", "context_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise UsageError(f"{name} is {shown(value)}; expected a whole number from 0.")
        if self.kv_type not in KV_BYTES:
            raise UsageError(f"kv_type is {shown(self.kv_type)}; expected one of {', '.join(KV_BYTES)}.")
        if self.mode is not None and self.mode not in MODES:
            raise UsageError(f"mode is {shown(self.mode)}; expected one of {', '.join(MODES)}.")
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise UsageError(f"draft_tokens is {self.draft_tokens}; expected 1 to {MAX_DRAFT_TOKENS}.")
        for pattern, place in self.overrides:
            _check_override(pattern, place)

    def pinned_place(self, name: str) -> str | None:
        """Where the overrides put the part, None where they leave it open."""
        return next((place for pattern, place in self.overrides if re.fullmatch(pattern, name)), None)


def parse_override(text: str) -> tuple[str, str]:
    """`REGEX=PLACE` as the command line takes it. Raises UsageError."""
    pattern, equals, place = text.rpartition("=")
    if not equals:
        raise UsageError(f"override {shown(text)} has no '='; expected REGEX=gpu, REGEX=cpu or REGEX=stream.")
    _check_override(pattern, place)
    return pattern, place


def _check_override(pattern: str, place: str) -> None:
    if place not in PLACES:
        raise UsageError(f"override {shown(f'{pattern}={place}')} names no place; expected one of {', '.join(PLACES)}.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"override {shown(pattern)} is no regular expression ({error}).") from error
