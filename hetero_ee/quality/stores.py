"""Convert a model to a store whose matrices are rounded as texts show: for their inputs, or with bits dealt out."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from hetero_ee.calibration.stages import Chunk
from hetero_ee.config import Progress, warner
from hetero_ee.errors import UsageError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.draft_head import stored_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee.quality.bits import (
    MEASURED_TOKENS,
    dealt_layouts,
    layer_matrices,
    layout_bytes,
    least_bytes,
    rounding_costs,
)
from hetero_ee.quality.calibrated import CalibratedMatrices, CorrectedMatrices
from hetero_ee.quality.streamed import StreamedModel, opened
from hetero_ee.quality.texts import distinct_share, own_windows, text_windows
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.gguf_blocks import KEPT
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.quantization import GGUF, Quantization
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, Workers
from hetero_ee.weights.store.conversion import Written, planned_bytes, stored_spec, worker_threads
from hetero_ee.weights.store.library import make_quantized, open_cached, require_checkpoint
from hetero_ee.weights.store.manifest import ALIGNMENT_BYTES

CALIBRATED_TOKENS, DEALT_TOKENS = 8192, 2048
# Of given texts for smaller models, which read them in minutes: 5 to 10 % less KL divergence than with
# CALIBRATED_TOKENS (SmolLM2-135M, 2026-11-28).
SMALL_MODEL_TOKENS, SMALL_MODEL_WEIGHTS = 32768, 5 * 10**8
FEW = 0.25  # of the tokens asked for: with fewer, matrices follow the text's own words more than the language
REPETITIVE = 0.5  # share of distinct runs of tokens; novels and TinyStories have 0.9 or more
METHOD_VERSION = 1  # increases when the bytes of calibrated stores change
MEASURED_WINDOW = 64  # tokens, so that MEASURED_TOKENS come from several places
CALIBRATED_QUANTIZERS = (DEFAULT_QUANTIZER, "int5", "int6", "int8")


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a conversion rounds matrices. At most one of `bits` and `n_bytes` is given."""

    calibrates: bool = True  # rounds each matrix for its inputs
    corrects: bool = False  # and for the errors of the matrices before it
    texts: Sequence[str] | None = None  # None for texts that the model writes after a conversion without them
    n_tokens: int | None = None  # of the texts to use
    bits: float | None = None  # to deal out: average per weight of the layers' matrices, scales included
    n_bytes: int | None = None  # the same as a size of all weights

    @property
    def deals(self) -> bool:
        """Whether bits are dealt out over the matrices."""
        return self.bits is not None or self.n_bytes is not None


def make_rounded_store(
    folder: Path,
    rounding: Rounding,
    *,
    cache: Path,
    output: Path | None = None,
    quantizer: str | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Convert the checkpoint in `folder` as `make_store` does, with matrices rounded as `rounding` says.

    If bits are dealt out without a quantizer, a GGUF file's matrices keep their codes where their bytes suffice.

    Memory holds one block's weights in fp32, its inputs for all tokens, and second moments. If interrupted, the next
    call resumes: it passes the text through the finished blocks again.

    Raises:
        UsageError: if the text is too short, the size too small, or all matrices keep the checkpoint's codes.
        HeteroError: as `make_store` does.
    """
    require_checkpoint(folder)
    known = (DEFAULT_QUANTIZER,) if rounding.deals else CALIBRATED_QUANTIZERS
    if quantizer not in (None, *known):
        what = "bits are dealt out" if rounding.deals else "matrices are calibrated"
        raise UsageError(
            f"{what} with {', '.join(known)}; leave out ", MODEL_OPTIONS["quantizer"], f" {shown(quantizer)}."
        )
    spec, chosen = read_spec(folder), Quantization.of_model(folder, quantizer)
    if chosen.own is not None and not (rounding.deals and chosen.own == GGUF):
        raise UsageError(
            f"{folder.name} keeps its own codes ({chosen.own}), which would not change; add ",
            MODEL_OPTIONS["quantizer"],
            f" {DEFAULT_QUANTIZER} to replace them.",
        )
    how: dict[str, Any] = {"threads": threads, "progress": progress}
    n_bytes = _budget_bytes(spec, chosen, rounding) if rounding.deals else 0  # before texts, which need minutes
    reads = rounding.calibrates or n_bytes > least_bytes(layer_matrices(spec))  # else all matrices are in int4
    if rounding.texts and not reads:
        warner(progress)("All matrices are in int4, so no bits are dealt out, and the text is not read.")
    windows = _windows(folder, spec, chosen, rounding, cache, how) if reads else []
    if rounding.deals:
        with worker_threads(threads) as workers:
            chosen = _dealt(folder, chosen, n_bytes, windows, workers, progress)
    if not rounding.calibrates:
        return make_quantized(folder, chosen, cache=cache, output=output, **how)
    method = [METHOD_VERSION, windows, *(["best"] if rounding.corrects else [])]
    identity = hashlib.sha256(json.dumps(method).encode()).hexdigest()[:16]

    def matrices(workers: Workers, written: Written) -> CalibratedMatrices:
        model = StreamedModel(*opened(folder), windows, workers)
        return CorrectedMatrices(model, workers, written) if rounding.corrects else CalibratedMatrices(model, workers)

    calibrated = replace(chosen, calibration=identity)
    return make_quantized(folder, calibrated, cache=cache, output=output, fit_with=matrices, **how)


def _windows(
    folder: Path, spec: ModelSpec, plain: Quantization, rounding: Rounding, cache: Path, how: dict[str, Any]
) -> list[Chunk]:
    """Return the token ids of the texts, and warn of texts that say little about others."""
    n_tokens = rounding.n_tokens or (CALIBRATED_TOKENS if rounding.calibrates else DEALT_TOKENS)
    if rounding.texts is None:
        store, _ = open_cached(folder, spec, plain, cache, **how)
        return own_windows(store, n_tokens, how["threads"], how["progress"])
    n_used = n_tokens
    if rounding.calibrates and rounding.n_tokens is None:
        n_weights = sum(tensor.n_elements for tensor in all_tensors(decoder_blocks(spec)))
        n_used = SMALL_MODEL_TOKENS if n_weights < SMALL_MODEL_WEIGHTS else n_tokens
    windows = text_windows(Tokenizer.load(folder, spec.vocab_size), rounding.texts, n_used)
    warn = warner(how["progress"])
    if (n_found := sum(map(len, windows))) < FEW * n_tokens:
        warn(f"The text has only {n_found:,} tokens, so other texts may get worse; {n_tokens:,} or more are better.")
    if (share := distinct_share(windows)) < REPETITIVE:
        warn(f"The text repeats itself ({share:.0%} of its phrases are distinct), so other texts may get worse.")
    return windows


def measured_windows(windows: Sequence[Chunk]) -> list[Chunk]:
    """Return the beginnings of some windows, spread evenly, of MEASURED_TOKENS in all."""
    some = windows[:: max(1, len(windows) * MEASURED_WINDOW // MEASURED_TOKENS)]
    return [window[:MEASURED_WINDOW] for window in some]


def _budget_bytes(spec: ModelSpec, plain: Quantization, rounding: Rounding) -> int:
    """Return the bytes for the layers' matrices. Raises: UsageError: if they are too few."""
    matrices = layer_matrices(spec)
    n_weights, least = sum(each.n_elements for each in matrices), least_bytes(matrices)
    if rounding.n_bytes is None:
        n_bytes = int((rounding.bits or 0.0) * n_weights / 8)
    else:  # each matrix has two regions that begin at a page
        rounded = replace(plain, own=None)
        others = planned_bytes(all_tensors(stored_blocks(stored_spec(spec, rounded))), rounded) - least
        n_bytes = rounding.n_bytes - others - 2 * ALIGNMENT_BYTES * len(matrices)
    if n_bytes < least:
        least_bits = 8 * least / n_weights
        if rounding.n_bytes is None:
            raise UsageError(
                f"{rounding.bits:.2f} bits are too few: the layers' matrices need {least_bits:.2f} or more."
            )
        smallest = ceil(100 * (rounding.n_bytes + least - n_bytes) / 2**20) / 100
        raise UsageError(
            f"the size is too small: the weights need {smallest:,.2f} MiB or more, with {least_bits:.2f} bits each."
        )
    return n_bytes


def _dealt(
    folder: Path,
    plain: Quantization,
    n_bytes: int,
    windows: Sequence[Chunk],
    workers: Workers,
    progress: Progress | None,
) -> Quantization:
    """Return the quantization with the layouts that n_bytes for the layers' matrices allow."""
    spec, read = opened(folder)
    matrices = layer_matrices(spec)
    costs = dict.fromkeys(matrices, 1.0)
    if n_bytes > least_bytes(matrices):
        model = StreamedModel(spec.in_plain_int4, read, measured_windows(windows), workers)
        costs = rounding_costs(model, plain.matrices, workers, progress)
    own = {} if plain.own is None else _own_layouts(folder, spec)
    layouts = dealt_layouts(costs, n_bytes, own)
    bits = (
        8 * sum(layout_bytes(each, layouts[each.name]) for each in matrices) / sum(each.n_elements for each in matrices)
    )
    usual = own if plain.own else dict.fromkeys(layouts, "int4")
    changed = layouts.items() - usual.items()
    return replace(plain, bits=round(bits, 2), layouts=tuple(sorted(changed)))


def _own_layouts(folder: Path, spec: ModelSpec) -> dict[str, str]:
    """Return the layouts of the layers' matrices whose codes in a GGUF file tiles can hold."""
    checkpoint = open_checkpoint(folder, spec)
    kept = (tensor.name for tensor in layer_matrices(spec) if KEPT.keys() >= set(checkpoint.types(tensor.name)))
    return {name: dict(spec.matrix_layouts).get(name, "int4") for name in kept}
