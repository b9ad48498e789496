"""Translates overrides that name tensors as llama.cpp does, such as `exps=CPU`, to overrides of this engine's parts.

llama.cpp searches the pattern in the names of single tensors, such as blk.3.ffn_up_exps.weight. This engine places all
matrices of a part together, so a pattern has to match all of them or none.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_ee.errors import UsageError, shown
from hetero_ee.planning.limits import OVERRIDE
from hetero_ee.planning.parts import Part

TENSORS = {  # by the part's label; `*` is the layer
    "attention": ("blk.*.attn_q", "blk.*.attn_k", "blk.*.attn_v", "blk.*.attn_output"),
    "delta": ("blk.*.attn_qkv", "blk.*.attn_gate", "blk.*.ssm_out"),
    "ffn": ("blk.*.ffn_up", "blk.*.ffn_down"),
    "moe": ("blk.*.ffn_gate_exps", "blk.*.ffn_up_exps", "blk.*.ffn_down_exps"),
    "head": ("output",),
    "embedding": ("token_embd",),
}


@dataclass(frozen=True, slots=True)
class Overrides:
    """Overrides of parts, and the parts whose experts stay in RAM, even if a GPU has their routers."""

    pins: tuple[tuple[str, str], ...]
    cpu_experts: frozenset[str] = frozenset()  # names of parts

    def pinned(self, name: str) -> str | None:
        """Return the placement of the first override that matches the part's name, None if none does."""
        return next((placement for pattern, placement in self.pins if re.fullmatch(pattern, name)), None)


def translated(overrides: Sequence[tuple[str, str]], n_cpu_moe: int | None, parts: Sequence[Part]) -> Overrides:
    """Return the overrides by names of parts. A pattern that matches whole names of parts is not llama.cpp's.

    Args:
        n_cpu_moe: number of first layers whose experts stay on the CPU, too; None for none.

    Raises:
        UsageError: if a pattern matches only some of a part's matrices.
    """
    pins, cpu_experts = list[tuple[str, str]](), set[str]()
    left = list(parts)
    for pattern, placement in overrides:
        found = [part for part in left if re.fullmatch(pattern, part.name)]
        if found or not (found := [part for part in left if _matches(pattern, part)]):
            pins.append((pattern, placement))
        elif placement == "cpu":
            cpu_experts |= {part.name for part in found if part.has_experts}
            pins += [(re.escape(part.name), placement) for part in found if not part.has_experts]
        else:
            pins += [(re.escape(part.name), placement) for part in found]
        left = [part for part in left if part not in found]
    if n_cpu_moe is not None:
        cpu_experts |= {part.name for part in left if part.has_experts and (part.layer or 0) < n_cpu_moe}
    return Overrides(tuple(pins), frozenset(cpu_experts))


def _matches(pattern: str, part: Part) -> bool:
    """Return whether the pattern matches the names of all of a part's tensors in llama.cpp."""
    layer = "" if part.layer is None else str(part.layer)
    names = [f"{name.replace('*', layer)}.weight" for name in TENSORS.get(part.label, ())]
    found = [name for name in names if re.search(pattern, name)]
    if found and len(found) < len(names):
        missed = next(name for name in names if name not in found)
        raise UsageError(
            OVERRIDE,
            f" {shown(pattern)} matches {found[0]} and not {missed}; the matrices of {part.name} stay together, so let "
            "it match all of them or none.",
        )
    return bool(found)
