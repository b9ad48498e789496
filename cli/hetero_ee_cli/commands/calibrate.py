"""`hetero-ee calibrate`: measures after how many layers a model's tokens are known, and stores the result."""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.engine import CALIBRATION_TOKENS, MODEL_OPTIONS, OFF, RUN_OPTIONS, TOKENS, UNQUANTIZED
from hetero_ee.weights.store.calibration_files import PARTIAL_SUFFIX
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import Json, typer_option, with_options
from hetero_ee_cli.terminal.output import print_document, printable, say, table
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.calibration.job import CalibrationOutcome, CalibrationRequest
    from hetero_ee.sparsity.curves import SparsityCurves
    from hetero_ee.sparsity.job import PredictorOutcome, SparsityOutcome
    from hetero_ee.sparsity.predictor import NeuronPredictor
    from hetero_ee.sparsity.request import SparsityRequest
    from hetero_ee.speculation.exits.calibration import DraftedExits
    from hetero_ee.speculation.exits.certificate import Certificate, CertifiedExit
    from hetero_ee_cli.reports.gain import Gain

STANDARD_INPUT = "-"
QUICK_TOKENS = 2048  # of a first look, after which a model without a gain needs no more
CLEAR_LOSS = 0.95  # expected share of full mode's speed below which more text would not turn a loss into a gain
MAX_NAMED = 3  # texts named in the description


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Options for the calibration text, the measurements, and the output."""

    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to calibrate on, - for standard input; can be given more than once. [default: the model's own]"
        ),
    ] = None
    tokens: Annotated[int | None, typer.Option(*TOKENS.flags, help=TOKENS.full_help)] = None
    draft_head: Annotated[str | None, typer_option(RUN_OPTIONS["draft_head"])] = None
    draft_model: Annotated[str | None, typer_option(RUN_OPTIONS["draft_model"])] = None
    force: Annotated[bool, typer.Option("--force", help="Calibrate again even if there is a calibration.")] = False
    certify: Annotated[
        bool, typer.Option("--certify", help="Certify the exits too, for mode certified: takes longer than the rest.")
    ] = False
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help=f"Calibrate on {CALIBRATION_TOKENS:,} tokens even if a quick look at {QUICK_TOKENS:,} finds no gain.",
        ),
    ] = False
    show: Annotated[bool, typer.Option("--show", help="Only show the existing calibration.")] = False
    as_json: Json = False

    def check(self) -> None:
        """Check that the options are compatible."""
        if self.full and self.tokens is not None:
            raise UsageError("--full is for the default number of tokens and --tokens for another; give one of them.")
        if self.show and self.drafts:
            raise UsageError("--show only prints the existing calibration; leave out the draft head or draft model.")
        if self.show and (self.force or self.certify or self.full or self.text or self.tokens is not None):
            others = "--force, --full, --certify, --text and --tokens"
            raise UsageError(f"--show only prints the existing calibration; drop {others}, or drop --show.")

    @property
    def drafts(self) -> dict[str, str]:
        """The draft head and the draft model that the user names."""
        named = {"draft_head": self.draft_head, "draft_model": self.draft_model}
        return {name: value for name, value in named.items() if value is not None}

    def request(self) -> "CalibrationRequest":
        """Return the library's request. Reads the texts."""
        from hetero_ee.calibration.job import CalibrationRequest

        changes: dict[str, Any] = {"force": self.force or self.full, "certify": self.certify}
        if self.tokens is not None:
            changes["n_tokens"] = self.tokens
        if not self.text:
            return CalibrationRequest(**changes)
        texts = tuple(read_text("text", None if str(file) == STANDARD_INPUT else file) for file in self.text)
        names = ["standard input" if str(file) == STANDARD_INPUT else printable(file.name) for file in self.text]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return CalibrationRequest(texts=texts, description=", ".join(names[:MAX_NAMED]) + more, **changes)


@with_options(without={"profile": "nothing is planned for it"})
def calibrate(wanted: CalibrateOptions, engine: ModelOptions, model: ModelArgument = None) -> None:
    """Measure and fit a model's early exits, keep the result next to its converted weights, and say what it gains.

    Half of the text trains exit maps and predictors, a quarter sets thresholds, and the rest gives the metrics. If
    interrupted, run it again: it resumes. An existing calibration is shown, not made again.
    Exits for mode specee are also fitted for the candidates of the model's draft head, or of the draft named here.
    Without --tokens, --certify and --sparsity, a quick look at 2,048 tokens comes first. If exits clearly slow this
    model down, that is kept and the command ends; --full goes on all the same.
    With --certify, 1,500 prompts are then continued at full depth, and every exit layer judges each of their tokens:
    mode certified keeps its promise by that.
    With --sparsity, a share or auto, it is also measured which FFN neurons the model can do without; with --sparsity
    predicted, what says which of them may be active is fitted, to 16,384 tokens where not --tokens says otherwise.
    """
    options = engine.arguments(model)
    wanted.check()
    with ending_at_once():
        from hetero_ee.sparsity.request import SparsityRequest

        request = wanted.request()  # once, since standard input ends
    asked = SparsityRequest.parsed(options.get("sparsity"))
    looks_first = asked is None and not (wanted.show or wanted.full or wanted.certify or wanted.tokens is not None)
    first = replace(request, n_tokens=QUICK_TOKENS) if looks_first else request
    found = _existing(engine, options, model, asked) if wanted.show else _made(wanted, first, options, asked)
    gain = None if wanted.show or asked is not None else _gain(options)  # plans are of dense FFNs
    if looks_first and _is_first_look(wanted, found.exits):
        if gain is not None and gain.is_loss(CLEAR_LOSS):
            say(f"A quick look at {QUICK_TOKENS:,} tokens finds no gain, so this is all; --full goes on.")
        else:
            say(f"A quick look finds no clear loss; going on with {CALIBRATION_TOKENS:,} tokens (--full resumes this).")
            found, gain = _made(wanted, replace(request, force=True), options, asked), _gain(options)
    if wanted.as_json:
        print_document(_document(options["model"], found, gain), with_version=True)
    else:
        print("\n".join(_report(found)))
        if gain is not None:
            print(gain.line)
    say(_closing_line(found.exits, show=wanted.show))


@dataclass(frozen=True, slots=True)
class _Found:
    exits: "CalibrationOutcome"
    curves: "SparsityCurves | None" = None
    predictor: "NeuronPredictor | None" = None


def _is_first_look(wanted: CalibrateOptions, exits: "CalibrationOutcome") -> bool:
    """Return whether more text is left to calibrate on, after a quick look of now, or of a run that was interrupted."""
    n_tokens = exits.calibration.text.n_tokens
    if not exits.is_new:
        return n_tokens < 2 * QUICK_TOKENS and Path(f"{exits.folder}{PARTIAL_SUFFIX}").exists()
    return len(wanted.text or ()) != 1 or n_tokens > CLEAR_LOSS * QUICK_TOKENS  # else that was the whole text


def _made(
    wanted: CalibrateOptions, request: "CalibrationRequest", options: dict[str, Any], asked: "SparsityRequest | None"
) -> _Found:
    """Calibrate. The outcome counts as new if any part is new, and includes the seconds of all parts."""
    with ending_at_once():
        from hetero_ee.engine import Engine
    from hetero_ee.sparsity.job import PREDICTOR_TOKENS
    from hetero_ee.sparsity.request import DENSE, UNPREDICTED

    laid_out = {} if asked is None else {"sparsity": UNPREDICTED if asked.first_in_rows else DENSE}
    opened: dict[str, Any] = {"profile": OFF}  # a plan would be for other work
    if wanted.drafts:
        opened = {**wanted.drafts, "mode": "full", "gpu_layers": 0}
    alone = options | opened | laid_out
    with stage_progress() as progress, Engine.from_pretrained(progress=progress, **alone) as engine:
        exits = engine.calibrate(request, progress)
        if asked is None or (asked.is_exact and not asked.is_predicted):
            return _Found(exits)
        neurons: PredictorOutcome | SparsityOutcome
        if asked.is_predicted:
            whole = request if wanted.tokens is not None else replace(request, n_tokens=PREDICTOR_TOKENS)
            neurons = fitted = engine.calibrate_predictor(whole, progress)
            found = _Found(exits, predictor=fitted.predictor)
        else:
            neurons = measured = engine.calibrate_sparsity(request, progress, asked.share)
            found = _Found(exits, measured.curves)
    exits = replace(exits, seconds=exits.seconds + neurons.seconds, is_new=exits.is_new or neurons.is_new)
    return replace(found, exits=exits)


def _existing(
    engine: ModelOptions, options: dict[str, Any], model: str | None, asked: "SparsityRequest | None"
) -> _Found:
    from hetero_ee.calibration.job import found_calibration
    from hetero_ee.calibration.location import CalibrationPlace
    from hetero_ee.config import cache_folder
    from hetero_ee.hub.config_file import read_spec
    from hetero_ee.sparsity.curves import WAY_OUT
    from hetero_ee.sparsity.job import found_predictor, found_sparsity
    from hetero_ee.sparsity.predictor import WAY_OUT as PREDICTOR_WAY_OUT

    quantizer = options["quantizer"]
    if quantizer == UNQUANTIZED:
        raise UsageError(
            "a calibration belongs to a store, and ",
            MODEL_OPTIONS["quantizer"],
            f" {UNQUANTIZED} has none; leave that out.",
        )
    with stage_progress() as progress:
        folder = engine.model_folder(model, progress, configuration_only=True)
    layout = {"neuron_major": asked is not None, "first_in_rows": asked is not None and asked.first_in_rows}
    place = CalibrationPlace.of_model(read_spec(folder), folder, cache_folder(), quantizer, **layout)
    found = found_calibration(place)
    if found is None:
        name = options["model"]
        again = {"-m": name, "--sparsity": options.get("sparsity")}
        command = shlex.join(["hetero-ee", "calibrate", *(word for item in again.items() if item[1] for word in item)])
        raise UsageError(f"there is no calibration of {name or 'the demo model'} yet; make one with {command}.")
    found = replace(found, certificate=place.certificate(found.calibration))
    curves, predictor = found_sparsity(place), found_predictor(place)
    if asked is not None and (predictor if asked.is_predicted else asked.is_exact or curves) is None:
        say(f"Only the exits are calibrated; {PREDICTOR_WAY_OUT if asked.is_predicted else WAY_OUT} for the neurons.")
    return _Found(found, curves, predictor)


def _gain(options: dict[str, Any]) -> "Gain | None":
    """Return the gain in speed, or None with a notice if this machine can't run a plan for the model."""
    from hetero_ee_cli.reports.gain import measured_gain

    try:
        with stage_progress() as progress:
            return measured_gain(options, progress)
    except HeteroError as error:
        say(f"What the calibration gains can't be measured: {printable(str(error))}")
        return None


def _closing_line(outcome: "CalibrationOutcome", *, show: bool) -> str:
    """Return a line with the calibration's text, date and folder."""
    text = outcome.calibration.text
    what = f"{text.n_tokens:,} tokens of {printable(text.description)}"
    if outcome.is_new:
        when = f"{outcome.seconds:.0f} s"
    else:
        when = f"calibrated on {outcome.date}" if show else f"already calibrated on {outcome.date}; use --force to redo"
    return f"[ {what} | {when} | {printable(str(outcome.folder))} ]"


def _report(found: _Found) -> Iterator[str]:
    """Yield the lines on exits, certified exits and neurons."""
    calibration = found.exits.calibration
    rows: list[tuple[str, ...]] = [
        ("exit layer", "agreement", "with map", "exit rate", "precision", "recall", "acceptance")
    ]
    for each in calibration.exit_layers:
        metrics = each.metrics
        mapped = "-" if metrics.mapped_agreement is None else f"{metrics.mapped_agreement:.3f}"
        gate = metrics.exit_rate, metrics.precision, metrics.recall, metrics.acceptance
        rows.append((str(each.exit_layer), f"{metrics.agreement:.3f}", mapped, *(f"{share:.3f}" for share in gate)))
    yield table(rows, numbers_from=0)
    yield f"\ncandidate exit layers: {', '.join(map(str, calibration.schedule)) or 'none'}"
    if calibration.drafted is not None:
        yield from _drafted_lines(calibration.drafted)
    depths = calibration.depths
    means = f"mean depth {depths.mean_depth:.2f} of {calibration.n_layers} layers"
    yield f"{means} ({depths.oracle_mean_depth:.2f} with perfect predictors)"
    yield f"{depths.locality:.0%} of tokens exit within 2 layers of one of the previous 5"
    if found.exits.certificate is not None:
        yield from _certificate_lines(found.exits.certificate)
    if found.curves is not None:
        yield from _neuron_lines(found.curves)
    if found.predictor is not None:
        chosen = found.predictor.chosen()
        yield (
            f"\npredicted: {chosen.predicted_share:.1%} of FFN neurons, with {chosen.recall:.1%} of the "
            f"{chosen.active_share:.1%} that are active; KL divergence {chosen.kl_nats:.5f} nats (rank "
            f"{found.predictor.rank})"
        )


def _drafted_lines(drafted: "DraftedExits") -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("exit layer", "could exit", "exit rate", "precision", "recall")]
    for exit_layer, each in enumerate(drafted.exit_layers, 1):
        shares = each.metrics.oracle, each.metrics.exit_rate, each.metrics.precision, each.metrics.recall
        rows.append((str(exit_layer), *(f"{share:.3f}" for share in shares)))
    yield f"\ncandidates of {printable(drafted.draft)}, with the model's token among them at {drafted.coverage:.1%}:"
    yield table(rows, numbers_from=0)
    yield f"\ncandidate exit layers with them: {', '.join(map(str, drafted.schedule))}"


def _certified(certificate: "Certificate") -> "dict[float, list[CertifiedExit]]":
    """Return the certified exits of each exit layer, by risk. Risks that would need more prompts are left out."""
    from hetero_ee.calibration.certify import RISKS

    found = {}
    for risk in RISKS:
        with suppress(UsageError):
            found[risk] = [certificate.certified_exit([each], risk) for each in certificate.exit_layers]
    return found


def _certificate_lines(certificate: "Certificate") -> Iterator[str]:
    of = f"{certificate.n_prompts:,} prompts of {printable(certificate.text)}"
    yield f"\ncertified on {of}: share of tokens that may exit at a risk of"
    found = _certified(certificate)
    rows = [["exit layer", *(f"{risk:6.0%}" for risk in found)]]
    for row in zip(*found.values(), strict=True):
        rows.append([str(row[0].exit_layers[0]), *(f"{each.shares[0]:6.3f}" for each in row)])
    yield table(rows, numbers_from=0)
    for each in certificate.on_policy:
        yield (
            f"texts of {each.n_tokens:,} tokens at a risk of {each.risk:.0%}, exits after layer {each.exit_layer}: "
            f"{each.n_exited / each.n_tokens:.1%} exit, {each.changed:.2%} of all are not the full model's choice there"
        )


def _neuron_lines(curves: "SparsityCurves") -> Iterator[str]:
    automatic = None
    with suppress(UsageError):  # no share is good enough
        automatic = curves.auto().target
    rows = [("neurons left out: asked", "on held-out text", "KL divergence (nats)", "")]
    for each in sorted(curves.measured, key=lambda each: each.target):
        name = "auto" if each.target == automatic else ""
        rows.append((f"{each.target:.0%}", f"{each.share:.1%}", f"{each.kl_nats:.5f}", name))
    yield "\n" + table(rows, numbers_from=0)


def _document(model: str | None, found: _Found, gain: "Gain | None") -> dict[str, Any]:
    outcome, calibration, certificate = found.exits, found.exits.calibration, found.exits.certificate
    exit_layers = [
        {
            "exit_layer": each.exit_layer,
            "map_rank": each.exit_map.rank if each.exit_map else None,
            "threshold": each.threshold,
            "partial_threshold": each.partial_threshold if each.partial_predictor else None,
            **asdict(each.metrics),
        }
        for each in calibration.exit_layers
    ]
    predictor = None
    if found.predictor is not None:
        measured = [asdict(each) for each in sorted(found.predictor.measured, key=lambda each: each.margin)]
        predictor = {"rank": found.predictor.rank, **asdict(found.predictor.chosen()), "measured": measured}
    return {
        "model": model or "demo",
        "folder": str(outcome.folder),
        "seconds": outcome.seconds,
        "is_new": outcome.is_new,
        "date": outcome.date,
        "text": asdict(calibration.text),
        "exit_layers": exit_layers,
        "schedule": calibration.schedule,
        "depths": asdict(calibration.depths),
        "drafted": None if calibration.drafted is None else _drafted_document(calibration.drafted),
        "certificate": None if certificate is None else _certificate_document(certificate),
        "sparsity": None if found.curves is None else [asdict(each) for each in found.curves.measured],
        "gain": None if gain is None else asdict(gain),
        "predictor": predictor,
    }


def _drafted_document(drafted: "DraftedExits") -> dict[str, Any]:
    rows = enumerate(drafted.exit_layers, 1)
    exit_layers = [{"exit_layer": n, "threshold": each.threshold, **asdict(each.metrics)} for n, each in rows]
    known = {name: getattr(drafted, name) for name in ("draft", "coverage", "schedule", "depths")}
    return known | {"exit_layers": exit_layers}


def _certificate_document(certificate: "Certificate") -> dict[str, Any]:
    return {
        "text": certificate.text,
        "kv_type": certificate.kv_type,
        "n_prompts": certificate.n_prompts,
        "n_tokens": len(certificate.judgements),
        "on_policy": [asdict(each) | {"changed": each.changed} for each in certificate.on_policy],
        "exits": [asdict(each) for found in _certified(certificate).values() for each in found],
    }
