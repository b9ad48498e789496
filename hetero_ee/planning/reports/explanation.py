"""Explains a plan in words and a map, for a terminal or a bug report."""

import textwrap
from collections.abc import Sequence
from itertools import groupby

from hetero_ee.options.engine import EARLY_EXIT_MODES
from hetero_ee.planning.plan import EXIT, SEQUENCE, PlacedPart, Plan, TimeTerm
from hetero_ee.planning.times.threads import REQUEST_PROMPT_TOKENS
from hetero_ee_profiles.units import GIB, MIB

LINE_COLUMNS, HASH_DIGITS = 100, 16
NO_BREAK = "\N{NO-BREAK SPACE}"
LEGEND = {  # of placements when decoding, by their first letter; each begins with the letter that the map shows
    "g": "G GPU",
    "c": "C CPU",
    "s": "s streamed to the GPU",
    "d": "d read from the disk",
    "h": "h hot neurons or experts on the GPU, the others on the CPU",
}


def explained(plan: Plan) -> str:
    """Return the explanation of a plan, in lines of at most about LINE_COLUMNS characters."""
    return "\n".join([_title(plan), "", *_map(plan), "", *_memory(plan), "", *_expected(plan), *_reasons(plan)])


def sized(n_bytes: float) -> str:
    """Format a number of bytes, in B to GiB."""
    if n_bytes < MIB / 10:
        return f"{n_bytes / 1024:.1f} KiB" if n_bytes >= 1024 else f"{n_bytes:.0f} B"
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB / 10 else f"{n_bytes / MIB:.1f} MiB"


def change(rate: float, before: float) -> str:
    """Format the ratio of two rates: as a percentage, or as a factor if it is 2 or more."""
    factor = rate / before
    percent = f"{factor - 1:+.0%}"
    return f"{factor:.1f} times" if factor >= 2 else "the same" if percent in ("+0%", "-0%") else percent


def _title(plan: Plan) -> str:
    n_layers = 1 + max(part.layer or 0 for part in plan.parts)
    weights = sized(sum(part.weight_bytes for part in plan.parts))
    kind = "" if plan.hardware_kind == "measured" else " (DERIVED from data sheets, nothing measured)"
    name = plan.model if plan.name is None else f"{plan.name} ({plan.model})"
    return f"{name}, {n_layers} layers, {weights} of weights, on {plan.hardware}{kind}"


def _map(plan: Plan) -> list[str]:
    n_layers = 1 + max(part.layer or 0 for part in plan.parts)
    lines = [f"{'layer':10} 0{n_layers - 1:>{max(1, n_layers - 1)}}"]
    for kind in dict.fromkeys(part.kind for part in plan.parts if part.layer is not None):
        letters = {part.layer: _letter(part) for part in plan.parts if part.kind == kind}
        lines.append(f"{kind:10} {''.join(letters.get(layer, ' ') for layer in range(n_layers))}".rstrip())
    lines += [f"{part.name:10} {_letter(part)}" for part in (plan.parts[0], plan.parts[-1])]
    used = {part.decode_placement[0] for part in plan.parts}
    n_streamed = sum(part.prefill_placement == "visit" for part in plan.parts)
    if n_streamed:
        lines.append(f"{'prompts':10} {n_streamed} parts on the CPU are streamed to the GPU while a prompt is read")
    return [*lines, f"{'':10} {', '.join(text for letter, text in LEGEND.items() if letter in used)}"]


def _letter(part: PlacedPart) -> str:
    return LEGEND[part.decode_placement[0]][0]


def _memory(plan: Plan) -> list[str]:
    budgets = {"gpu": plan.vram_budget_bytes, "cpu": plan.ram_budget_bytes}
    lines = []
    for device, terms in groupby(sorted(plan.memory, key=lambda term: term.device), key=lambda term: term.device):
        parts = [f"{term.name} {sized(term.n_bytes)}" for term in terms if term.n_bytes]
        budget = f" of {sized(budgets[device])}" if device in budgets else ""
        name = device.upper() if device != "disk" else "disk"
        lines += _wrapped(f"{name:10} {sized(plan.n_bytes(device))}{budget}: ", parts)
    return lines


def _expected(plan: Plan) -> list[str]:
    found, most = plan.prediction, plan.draft_length
    limit = "bandwidth limit" if plan.drafts is None else "bandwidth limit without drafts"
    how = "every token through all layers"
    brings = f"{found.tokens_per_pass:.1f} tokens from a batch of"
    if plan.drafts == SEQUENCE:
        what = "sequences" if plan.tree_width == 1 else "trees"
        how = f"{what} of {most - 1} drafts from elsewhere, {brings} {most}"
    elif plan.drafts == EXIT:
        how = f"drafts exit after layer {plan.exit_layer}, {brings} {found.batch_per_pass:.1f} (at most {most})"
    elif found.mean_depth is not None:
        how = (
            f"tokens exit after layer {', '.join(map(str, plan.exit_layers))}, {found.mean_depth:.1f} layers a token, "
            f"a pass of all for {found.tokens_per_pass:.1f} (at most {most})"
        )
    elif plan.mode in EARLY_EXIT_MODES:
        how = "how deep tokens go is not known, times are full mode's"
    return [
        f"{'hash':10} {plan.sha256[:HASH_DIGITS]}",
        *textwrap.wrap(f"{'mode':10} {plan.mode}: {how}", LINE_COLUMNS, subsequent_indent=" " * 11),
        f"{'expected':10} text {found.generated_tokens_per_s:.2f} tokens/s at context length {found.context_tokens} "
        f"({limit}: {found.ceiling_tokens_per_s:.2f})",
        f"{'':10} prompt {found.prompt_tokens_per_s:.1f} tokens/s in chunks of {plan.prefill_chunk_tokens}; time to "
        f"first token ({min(REQUEST_PROMPT_TOKENS, plan.context_tokens)}-token prompt): {found.first_token_s:.3g} s",
        *_compared(plan),
        *_wrapped(f"{'per layer':10} ", [f"{term.name} {term.seconds * 1e3:.3g} ms" for term in found.layer_terms]),
        *_wrapped(f"{'per token':10} time: ", _shares(found.decode_terms)),
        *_wrapped(f"{'per chunk':10} time: ", _shares(found.prefill_terms)),
        *_wrapped(f"{'transfers':10} ", [f"{each.name} {sized(each.n_bytes)} per token" for each in found.moved_terms]),
    ]


def _compared(plan: Plan) -> list[str]:
    """Return lines that compare the speeds of the CPU only, of full mode and of the plan."""
    found = plan.prediction
    rate, other, alone = found.generated_tokens_per_s, found.other_mode_tokens_per_s, found.cpu_tokens_per_s
    full = rate if other is None or plan.mode == "full" else other
    rows: list[tuple[str, float | None, str]] = []
    if plan.n_bytes("gpu"):
        rows.append(("the CPU alone", alone, "too little RAM" if alone is None else ""))
    if full is not None:
        gain = "" if not rows or alone is None else f"{change(full, alone)} against the CPU alone"
        rows.append(("this plan, full mode" if plan.mode == "full" else "this split, full mode", full, gain))
        if plan.mode == "exact" or found.mean_depth is not None:
            name = "exact mode" if plan.mode == "exact" else plan.mode
            rows.append((f"this plan, {name}", rate, f"{change(rate, full)} against full mode"))
        elif other is not None and plan.mode == "full":
            rows.append(("exact mode, declined", other, f"{change(other, full)} against full mode"))
    lines = [f"{name:22}{'' if per_s is None else f'{per_s:8.2f} tokens/s'}  {gain}" for name, per_s, gain in rows]
    return [f"{label:10} {line}".rstrip() for label, line in zip(["compared", *[""] * 3], lines, strict=False)]


def _shares(terms: Sequence[TimeTerm]) -> list[str]:
    total = sum(term.seconds for term in terms)
    ordered = sorted(terms, key=lambda term: -term.seconds)
    return [f"{term.name} {term.seconds / total:.0%}" for term in ordered if term.seconds > total / 200]


def _reasons(plan: Plan) -> list[str]:
    wrapped = [line for reason in plan.reasons for line in textwrap.wrap(reason, LINE_COLUMNS)]
    return ["", *wrapped] if wrapped else []


def _wrapped(first: str, items: Sequence[str]) -> list[str]:
    """Wrap the items, separated by commas, without breaking any item."""
    held = ", ".join(item.replace(" ", NO_BREAK) for item in items)
    lines = textwrap.wrap(first + held, LINE_COLUMNS, subsequent_indent=" " * 11)
    return [line.replace(NO_BREAK, " ") for line in lines]
