"""Report on a run: its closing line, the tables of --stats, and its keys in JSON."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.decoding.simulation import LaneTime
    from hetero_ee.engine import Engine
    from hetero_ee.planning.plan import Plan
    from hetero_ee.runtime.devices.traffic import TextTraffic
    from hetero_ee.speculation.statistics import DraftStatistics, ExitStatistics
    from hetero_ee_cli.options.placement import Session

DECLINED = "Exact mode was declined"  # how the planner's reason for full mode begins
BAR_COLUMNS = 40
SLOW = 0.5  # share of the expected speed; predictions err by less
LEAST_SHARE = 0.005  # least share of a prompt's time that is reported


def closing_lines(
    session: "Session",
    result: "GenerationResult",
    *,
    prompt: str,
    seed: int | None,
    start_s: float,
    is_interrupted: bool,
) -> str:
    """Return counts and rates of a text, notices if it was cut or slow, and the details for --verbose and --stats.

    Args:
        prompt: The number of the prompt's tokens, in words.
        seed: None if it had no influence.
        start_s: When the text began, by time.perf_counter.
        is_interrupted: Whether Ctrl-C ended the text. Its speed is then not compared with the plan's.
    """
    from hetero_ee.decoding.result import FinishReason
    from hetero_ee.profiling.expectation import dropped_profile
    from hetero_ee_profiles.host.process import peak_memory_bytes

    engine, placement = session.engine, session.placement
    share, predicted = engine.neuron_share, engine.predicted_share
    guessed = "" if predicted is None else f", {predicted:.0%} predicted"
    found, expected = engine.draft_statistics, None if is_interrupted else expected_rate(engine, result)
    reading = "" if found is None else reading_words(found.reading_shares(result.prompt_s))
    usual = "" if expected is None else f" (expected {expected:.1f})"
    # A single token has no rate: the prompt's pass produces it.
    rate = f", {result.generated_tokens_per_s:.1f} t/s{usual}" if result.n_generated_tokens > 1 else ""
    parts = [
        f"prompt {prompt} tok, {result.prompt_tokens_per_s:.1f} t/s{reading}",
        f"gen {result.n_generated_tokens} tok{rate}",
        *_mode(engine),
        *([] if share is None else [f"{share:.0%} of FFN neurons used{guessed}"]),
        f"peak memory {peak_memory_bytes() / 2**30:.2f} GiB",
        *([] if seed is None else [f"seed {seed}"]),
    ]
    lines = [f"[ {' | '.join(parts)} ]"]
    if result.finish_reason is FinishReason.CONTEXT:
        lines.insert(0, f"(The context of {engine.context_tokens} tokens is full; the text ends here.)")
    lines += slowness(result, expected, engine.plan is not None and engine.plan.n_bytes("gpu") > 0)
    counts = result.n_prompt_tokens, result.n_generated_tokens
    dropped = "" if is_interrupted else dropped_profile(engine, *counts, result.generation_s)
    lines += [dropped] if dropped else []
    lines += _times(result, session) if placement.verbose else []
    return "\n".join(lines + (_statistics(engine, result, start_s) if placement.stats else []))


def expected_rate(engine: "Engine", result: "GenerationResult") -> float | None:
    """Return the tokens per second that the plan predicts for this text, None if it predicts none."""
    from hetero_ee.profiling.expectation import expected_tokens_per_s

    return expected_tokens_per_s(engine, result.n_prompt_tokens, result.n_generated_tokens)


def slowness(result: "GenerationResult", expected: float | None, uses_gpu: bool) -> list[str]:
    """Return a sentence if the text needed more than twice the expected time, else nothing."""
    from hetero_ee.profiling.expectation import MIN_S, MIN_TOKENS

    rate = result.generated_tokens_per_s
    is_short = result.generation_s < MIN_S or result.n_generated_tokens < MIN_TOKENS
    if expected is None or is_short or rate >= SLOW * expected:
        return []
    spilled = ", or the GPU driver may have moved some of its memory to system RAM" if uses_gpu else ""
    remedy = "Lower --vram-budget" if uses_gpu else "Close it"
    return [
        f"This text ran at {rate:.1f} tokens/s, less than half of the expected {expected:.1f}: another program may be "
        f"busy{spilled}. {remedy}, or measure again with hetero-ee profile --refresh."
    ]


def _times(result: "GenerationResult", session: "Session") -> list[str]:
    """Return the lines of --verbose, named as in ollama. The stages of loading come first, as far as they ran."""
    load_s = session.load_s
    stages = {stage.split(" for ")[0]: seconds for stage, seconds in session.phases.items()}
    values = {
        **{f"{stage[:1].lower()}{stage[1:]}": f"{seconds:.3f} s" for stage, seconds in stages.items()},
        "load time": f"{load_s:.3f} s",
        "time to first token": f"{result.prompt_s:.3f} s",
        "prompt eval count": f"{result.n_prefilled_tokens} tokens",
        "prompt eval duration": f"{result.prompt_s:.3f} s",
        "prompt eval rate": f"{result.prompt_tokens_per_s:.2f} tokens/s",
        "eval count": f"{result.n_generated_tokens} tokens",
        "eval duration": f"{result.generation_s:.3f} s",
        "eval rate": f"{result.generated_tokens_per_s:.2f} tokens/s",
        "total duration": f"{load_s + result.prompt_s + result.generation_s:.3f} s",
    }
    width = max(map(len, values)) + 2
    return [f"{name + ':':{width}}{value}" for name, value in values.items()]


def run_document(
    made: "Plan | None",
    drafts: "DraftStatistics | None",
    exits: "ExitStatistics | None" = None,
    traffic: "TextTraffic | None" = None,
) -> dict[str, Any]:
    """Return the plan as JSON keys, with draft or exit statistics and the bytes moved per token."""
    return {
        "mode": "full" if made is None else made.mode,
        "exit_layer": None if made is None else made.exit_layer,
        "draft_length": 1 if made is None else made.draft_length,
        "gpu_layers": 0 if made is None else made.gpu_layers,
        "plan_hash": None if made is None else made.sha256,
        "drafts": drafts_document(drafts),
        "exits": exits_document(exits),
        "bytes_per_token": None if traffic is None else traffic.per_token,
        "predicted_bytes_per_token": None if made is None else _predicted_bytes(made),
    }


def drafts_document(found: "DraftStatistics | None") -> dict[str, Any] | None:
    if found is None:
        return None
    derived = ("n_drafted", "n_accepted", "acceptance", "tokens_per_pass", "mean_exit_depth", "known_after")
    return asdict(found) | {name: getattr(found, name) for name in derived}


def _predicted_bytes(made: "Plan") -> dict[str, float]:
    return {term.name: term.n_bytes for term in made.prediction.moved_terms}


def traffic_lines(made: "Plan", traffic: "TextTraffic") -> list[str]:
    """Return lines with the bytes that a token moved, next to those that the plan expected."""
    from hetero_ee.planning.reports.explanation import sized

    found, expected = traffic.per_token, _predicted_bytes(made)
    rows = [
        f"{name} {sized(n_bytes)}" + (f" (expected {sized(expected[name])})" if name in expected else "")
        for name, n_bytes in found.items()
    ]
    return [f"{title:14}{row}" for title, row in zip(["bytes a token", *[""] * len(rows)], rows, strict=False)]


def exits_document(found: "ExitStatistics | None") -> dict[str, Any] | None:
    if found is None:
        return None
    derived = ("n_tokens", "n_exited", "mean_depth", "judged_per_token")
    return asdict(found) | {name: getattr(found, name) for name in derived}


def lane_lines(lanes: "Iterable[LaneTime]", prompt_s: float, generation_s: float) -> list[str]:
    """Return lines with the busy share of each device and link that was used."""
    from hetero_ee.runtime.trace import TITLES

    return [
        f"{TITLES[lane.lane]:20} busy {lane.prompt_s / (prompt_s or 1):4.0%} of the prompt, "
        f"{lane.generation_s / (generation_s or 1):4.0%} of the text"
        for lane in lanes
        if lane.prompt_s or lane.generation_s
    ]


def reading_words(shares: "dict[str, float]") -> str:
    """Return the share of a prompt's time that each draft source needed, or an empty string if it is negligible."""
    words = [f"{origin} {share:.0%}" for origin, share in shares.items() if share >= LEAST_SHARE]
    return f" ({', '.join(words)})" if words else ""


def draft_words(found: "DraftStatistics") -> str:
    """Return the tokens per pass of the later layers, the acceptance and the depth, in words."""
    if not found.n_passes:
        return "nothing to draft"
    accepted = f"{found.acceptance:.0%} accepted, " if found.n_drafted else ""
    return f"{found.tokens_per_pass:.1f} tok/pass, {accepted}depth {found.mean_exit_depth:.1f} of {found.n_layers}"


def draft_lines(found: "DraftStatistics") -> list[str]:
    """Return lines with drafts by origin, asynchronous drafts, drafts per step, and tokens by exit layer."""
    lines = [
        f"{'drafts':14}by {counts.origin}: {counts.n_drafted} drafted, {counts.n_accepted} accepted, "
        f"{counts.precision:.0%} of {counts.n_checked} verified were right"
        for counts in found.origins
    ]
    if found.n_ahead:
        lines.append(
            f"{'':14}asynchronous: {found.n_ahead} tokens drafted early, {found.n_ahead_kept / found.n_ahead:.0%} right"
        )
    lines += _bars("drafted per step", dict(enumerate(found.drafted_runs)))
    lines += _bars("accepted per step", dict(enumerate(found.accepted_runs)))
    return lines + _bars("known after layer", {n: count for n, count in found.known_after.items() if count})


def exit_words(found: "ExitStatistics") -> str:
    """Return the share of tokens that skipped layers and the mean number of layers passed, in words."""
    share = found.n_exited / (found.n_tokens or 1)
    return f"{share:.0%} exited, depth {found.mean_depth:.1f} of {found.n_layers}, unverified"


def exit_lines(found: "ExitStatistics") -> list[str]:
    judged = f"{'exits':14}{found.judged_per_token:.1f} exit layers judged a token"
    return [judged, *_bars("emitted after layer", {n: count for n, count in enumerate(found.depths) if count})]


def _mode(engine: "Engine") -> list[str]:
    """Return lines with the mode, its reason and the latest text's drafting; none without a plan."""
    from hetero_ee.planning.reports.explanation import change
    from hetero_ee.planning.schedule import is_worth_it

    made, found = engine.plan, engine.draft_statistics
    if made is None:
        return []
    if engine.exit_statistics is not None:
        return [f"{made.mode}: {exit_words(engine.exit_statistics)}"]
    if found is None:
        exact_per_s = made.prediction.other_mode_tokens_per_s
        if not _declined(engine) or exact_per_s is None:
            return ["full"]
        full_per_s = made.prediction.generated_tokens_per_s
        gain = change(exact_per_s, full_per_s).replace("the same", "no speedup")
        reading = " of the text, less than it costs of a prompt" if is_worth_it(exact_per_s, full_per_s) else ""
        return [f"full (exact declined: {gain} expected{reading})"]
    n_tokens = made.draft_length if engine.drafting is None else engine.drafting.draft_length
    return [f"exact ({engine.draft_origin}, up to {n_tokens} token{'s' * (n_tokens > 1)}): {draft_words(found)}"]


def _declined(engine: "Engine") -> list[str]:
    """Return the planner's reason for full mode, if the user chose no mode."""
    asked = None if engine.plan_request is None else engine.plan_request.limits.mode
    if engine.plan is None or asked is not None:
        return []
    return [reason for reason in engine.plan.reasons if reason.startswith(DECLINED)]


def _statistics(engine: "Engine", result: "GenerationResult", start_s: float) -> list[str]:
    """Return lines with one text's time by device, as far as recorded, and its drafts."""
    from hetero_ee.decoding.simulation import lane_times

    total_s, spans, found = result.prompt_s + result.generation_s or 1.0, engine.spans, engine.draft_statistics
    start_s = min((span.start_s for span in spans if span.start_s >= start_s), default=start_s)
    read_s = {} if found is None else found.prompt_s  # by the draft sources
    reading = "".join(f"; {origin} {seconds:.3f} s" for origin, seconds in read_s.items())
    lines = [
        f"{'time':14}prompt {result.prompt_s:.3f} s ({result.prompt_s / total_s:.0%}{reading}), "
        f"text {result.generation_s:.3f} s ({result.generation_s / total_s:.0%})"
    ]
    seconds = result.prompt_s, result.generation_s
    lines += [f"{'':14}{line}" for line in lane_lines(lane_times(spans, start_s, *seconds), *seconds)]
    if engine.plan is not None and engine.traffic is not None:
        lines += traffic_lines(engine.plan, engine.traffic)
    if engine.exit_statistics is not None:
        return lines + exit_lines(engine.exit_statistics)
    return lines + (_declined(engine) if found is None else draft_lines(found))


def _bars(title: str, counts: dict[int, int]) -> list[str]:
    most = max(counts.values(), default=0) or 1
    return [
        f"{title:18}{label:>3}{count:7} {'#' * round(BAR_COLUMNS * count / most)}".rstrip()
        for label, count in counts.items()
    ]
