"""Finds the shortest command-line options that reproduce a plan exactly."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby

from hetero_ee.planning.candidates import PREFILL_CHUNKS
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import PlacedPart, Plan
from hetero_ee_profiles.units import GIB

Pin = tuple[str, str]  # an option and its value


def pins(made: Plan, limits: Limits) -> list[Pin]:
    """Return the command-line options that reproduce this plan."""
    found = [("-c", str(made.context_tokens)), ("-t", str(made.threads)), ("--kv-type", made.kv_type)]
    found.append(("--mode", made.mode))
    if limits.draft_length is not None:
        found.append(("--draft-tokens", str(limits.draft_length)))
    if made.tree_width > 1 or limits.draft_tree is not None:
        found.append(("--draft-tree", str(made.tree_width)))
    if made.prefill_chunk_tokens > max(PREFILL_CHUNKS):
        found.append(("-ub", str(made.prefill_chunk_tokens)))
    if made.risk:
        found.append(("--risk", str(made.risk)))
    found.append(("--ram-budget", gib(made.ram_budget_bytes)))
    if limits.snapshot_budget_bytes != Limits().snapshot_budget_bytes:
        found.append(("--snapshot-budget", gib(limits.snapshot_budget_bytes)))
    if not made.n_bytes("gpu"):
        return [*found, ("-ngl", "0")]
    found.append(("--vram-budget", gib(made.vram_budget_bytes)))
    return found + placement_pins(made.parts)


def gib(n_bytes: int) -> str:
    """Return the shortest decimal number of GiB that the command line converts to exactly n_bytes."""
    for n_digits in count():
        text = f"{n_bytes / GIB:.{n_digits}f}"
        if int(float(text) * GIB) == n_bytes:
            return text
    raise AssertionError("a float has an end")


def placement_pins(parts: Sequence[PlacedPart]) -> list[Pin]:
    """Return the shortest options that reproduce these placements.

    Three ways are compared: -ngl with overrides for the exceptions; a rule for each kind of part with overrides for the
    exceptions; and an override for each group of parts.
    """
    layers, head = [part for part in parts if part.layer is not None], _target(parts[-1])
    n_whole = next((part.layer or 0 for part in layers if _target(part) != "gpu"), len({part.layer for part in layers}))
    uses_gpu = any(_target(part).on_gpu for part in layers)
    outer = [] if (head == "gpu") == uses_gpu else [("-ot", f"head={head}")]  # where layers are, unless it is said
    kinds = list(dict.fromkeys(part.kind for part in layers))
    ways = [[*_patterns(layers, dict.fromkeys(kinds)), *outer]]
    usual = {kind: _most_common([_target(part) for part in layers if part.kind == kind]) for kind in kinds}
    rules = [(f".*{kind}", where) for kind, where in usual.items()]
    if len(set(usual.values())) == 1:
        rules = [("layers.*", usual[kinds[0]])]
    ways.append([*_patterns(layers, usual), *(("-ot", f"{pattern}={where}") for pattern, where in rules), *outer])
    if n_whole:
        others = [part for part in layers if (part.layer or 0) >= n_whole]
        ways.append([("-ngl", str(n_whole)), *_patterns(others, dict.fromkeys(kinds, Placement.CPU)), *outer])
    return min(ways, key=lambda way: sum(len(option) + len(value) for option, value in way))


def _patterns(layers: Sequence[PlacedPart], usual: Mapping[str, Placement | None]) -> Iterator[Pin]:
    """Yield an override for each group of parts whose placement differs from `usual`, the one for their kind."""
    found: dict[tuple[Placement, tuple[int, ...]], list[str]] = {}
    for kind, usual_placement in usual.items():
        parts = [part for part in layers if part.kind == kind]
        for placement in sorted({_target(part) for part in parts if _target(part) != usual_placement}):
            numbers = tuple(part.layer or 0 for part in parts if _target(part) == placement)
            found.setdefault((placement, numbers), []).append(kind)
    for (placement, numbers), kinds in found.items():
        which = kinds[0] if len(kinds) == 1 else ".*"
        yield "-ot", rf"layers\.{numbers_pattern(numbers)}\.{which}={placement}"


def numbers_pattern(numbers: Sequence[int]) -> str:
    """Return a regular expression that matches exactly these ascending numbers."""
    runs = [list(run) for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    found = [piece for run in runs for piece in _range_pieces(run[0][1], run[-1][1])]
    return found[0] if len(found) == 1 else f"({'|'.join(found)})"


def _range_pieces(first: int, last: int) -> Iterator[str]:
    """Yield regular expressions that together match the numbers from first to last."""
    tens, last_tens = first // 10, last // 10
    if first % 10:
        end = 9 if tens < last_tens else last % 10
        yield f"{tens or ''}{_digits(first % 10, end)}"
        tens += 1
    whole = last_tens if last % 10 == 9 else last_tens - 1
    if tens == 0 <= whole:
        yield r"\d"
        tens = 1
    if tens <= whole:
        yield from (piece + r"\d" for piece in _range_pieces(tens, whole))
    if last % 10 != 9 and last_tens >= first / 10:
        yield f"{last_tens or ''}{_digits(0, last % 10)}"


def _digits(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return r"\d" if (first, last) == (0, 9) else f"[{first}-{last}]" if last > first + 1 else f"[{first}{last}]"


def _target(part: PlacedPart) -> Placement:
    """Return the placement to pin: that in RAM for parts on the disk, since the planner moves them there itself."""
    return part.decode_placement.in_ram


def _most_common(placements: Sequence[Placement]) -> Placement:
    return max(dict.fromkeys(placements), key=placements.count)
