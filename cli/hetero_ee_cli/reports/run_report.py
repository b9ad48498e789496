"""How a text was decoded: the mode in the closing line, a table of --stats, and the keys of a JSON document."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.engine import Engine
    from hetero_ee.speculation.statistics import DraftStatistics

DECLINED = "Exact mode was declined"  # how the planner's reason for full mode begins
BAR_COLUMNS = 40


def mode_words(engine: "Engine") -> str | None:
    """The mode and why, with what drafting brought in the latest text; None where nothing was planned."""
    made, found = engine.plan, engine.draft_statistics
    if made is None:
        return None
    if found is None:
        asked = None if engine.placement is None else engine.placement.limits.mode
        is_declined = asked is None and any(reason.startswith(DECLINED) for reason in made.reasons)
        return "full (exact declined)" if is_declined else "full"
    n_rows = made.draft_length if engine.drafting is None else engine.drafting.draft_length
    return f"exact ({engine.draft_origin}, up to {n_rows} row{'s' * (n_rows > 1)}): {draft_words(found)}"


def draft_words(found: "DraftStatistics") -> str:
    """Tokens of a pass of the later layers, acceptance and depth."""
    accepted = f"{found.acceptance:.0%} accepted, " if found.n_drafted else ""
    return f"{found.tokens_per_pass:.1f} tok/pass, {accepted}depth {found.mean_exit_depth:.1f} of {found.n_layers}"


def uses_gpu(engine: "Engine") -> bool:
    """Whether the plan puts anything there."""
    return engine.plan is not None and engine.plan.n_bytes("gpu") > 0


def run_document(engine: "Engine") -> dict[str, Any]:
    """The plan's keys in JSON; those of drafts are None in full mode, the hash is None where nothing was planned."""
    made = engine.plan
    return {
        "mode": "full" if made is None else made.mode,
        "exit_layer": None if made is None else made.exit_layer,
        "draft_length": 1 if made is None else made.draft_length,
        "gpu_layers": 0 if made is None else made.gpu_layers,
        "plan_hash": None if made is None else made.sha256,
        "drafts": drafts_document(engine.draft_statistics),
    }


def drafts_document(found: "DraftStatistics | None") -> dict[str, Any] | None:
    """The counts and what follows from them; None in full mode."""
    if found is None:
        return None
    return asdict(found) | {
        "n_drafted": found.n_drafted,
        "n_accepted": found.n_accepted,
        "acceptance": found.acceptance,
        "tokens_per_pass": found.tokens_per_pass,
        "mean_exit_depth": found.mean_exit_depth,
    }


def statistics_table(engine: "Engine", result: "GenerationResult", start_s: float) -> str:
    """Where the time of one text went, and its drafts. start_s: when it began, by time.perf_counter."""
    total_s = result.prompt_s + result.generation_s or 1.0
    lines = [
        f"{'time':14}prompt {result.prompt_s:.3f} s ({result.prompt_s / total_s:.0%}), "
        f"text {result.generation_s:.3f} s ({result.generation_s / total_s:.0%})",
        *_lanes(engine, result, start_s),
    ]
    found = engine.draft_statistics
    if found is not None:
        lines += draft_lines(found)
    return "\n".join(lines)


def draft_lines(found: "DraftStatistics") -> list[str]:
    """Drafts by origin, rows drafted ahead, rounds by how many tokens were drafted and accepted, tokens by depth."""
    return [*_origins(found), *_ahead(found), *_runs(found), *_depths(found)]


def _lanes(engine: "Engine", result: "GenerationResult", start_s: float) -> list[str]:
    """How busy the devices and the link were, as far as it was recorded."""
    from hetero_ee.decoding.simulation import lane_times
    from hetero_ee.runtime.trace import TITLES

    spans = engine.spans
    start_s = min((span.start_s for span in spans if span.start_s >= start_s), default=start_s)
    return [
        f"{'':14}{TITLES[lane.lane]} busy {lane.prompt_s / (result.prompt_s or 1):.0%} of the prompt, "
        f"{lane.generation_s / (result.generation_s or 1):.0%} of the text"
        for lane in lane_times(spans, start_s, result.prompt_s, result.generation_s)
        if lane.prompt_s or lane.generation_s
    ]


def _origins(found: "DraftStatistics") -> list[str]:
    return [
        f"{'drafts':14}by {counts.origin}: {counts.n_drafted} drafted, {counts.n_accepted} accepted, "
        f"{counts.precision:.0%} of {counts.n_checked} judged right"
        for counts in found.origins
    ]


def _ahead(found: "DraftStatistics") -> list[str]:
    """Rows that began while those before them were verified."""
    if not found.n_ahead:
        return []
    return [f"{'':14}ahead: {found.n_ahead} rows begun early, {found.n_ahead_kept / found.n_ahead:.0%} right"]


def _runs(found: "DraftStatistics") -> list[str]:
    """For each length the rounds that drafted so many tokens, and those of which so many were accepted."""
    return [
        line
        for title, counts in (("drafted", found.drafted_runs), ("accepted", found.accepted_runs))
        for line in _bars(f"{title} a round", {str(n): count for n, count in enumerate(counts)})
    ]


def _depths(found: "DraftStatistics") -> list[str]:
    """The layers behind which the tokens were known."""
    return _bars("known after layer", {str(depth): count for depth, count in found.known_after.items() if count})


def _bars(title: str, counts: dict[str, int]) -> list[str]:
    most = max(counts.values(), default=0) or 1
    return [
        f"{title:18}{label:>3}{count:7} {'#' * round(BAR_COLUMNS * count / most)}".rstrip()
        for label, count in counts.items()
    ]
