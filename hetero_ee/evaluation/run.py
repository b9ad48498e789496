"""Runs modes one after another on the same texts and compares each with full mode, which runs first."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import torch

from hetero_ee.config import Progress
from hetero_ee.errors import HeteroError
from hetero_ee.evaluation.material import Ids, Material
from hetero_ee.evaluation.metrics import Estimate, doubled_words, first_divergence, n_equal, nats_and_divergence, ratio
from hetero_ee.evaluation.open_mode import FULL, EngineMode, Variant, Written
from hetero_ee.options.sampling import SamplingParams

WARM_UP_TOKENS = 4  # generated first, so that cold caches don't count


@dataclass(frozen=True, slots=True)
class Scored:
    """Sums over one held-out text's tokens after its prompt, as one mode predicts them."""

    n_tokens: int
    nats: float  # -log p of each
    kl_nats: float  # KL(full || mode) of each
    depth_sum: float


@dataclass(frozen=True, slots=True)
class ModeResult:
    """Metrics of one variant over the prompts or the held-out texts; None if there was nothing to count."""

    variant: Variant
    tokens_per_s: Estimate | None  # by this machine's clock
    emulated_tokens_per_s: Estimate | None  # by the emulated machine's
    speedup: Estimate | None  # full mode's seconds for the same prompts over this one's, emulated where they are
    identity: Estimate | None  # share of tokens that are full mode's in the same place
    tokens_before_divergence: Estimate | None  # per text; all its tokens if it equals full mode's
    first_divergences: tuple[int | None, ...]  # per text, None if it equals full mode's
    changed: Estimate | None  # share of tokens that the full model would not have chosen after the same text
    perplexity: Estimate | None  # on held-out text
    kl_nats: Estimate | None  # per token
    doubled_words: Estimate | None  # share of the generated words
    mean_depth: Estimate | None  # layers, for generated tokens
    scored_mean_depth: Estimate | None  # layers, for held-out tokens
    cpu_passes_per_token: Estimate | None  # passes through the CPU's layers


@dataclass(frozen=True, slots=True)
class Refused:
    variant: Variant
    reason: str


def evaluate(
    material: Material,
    variants: Sequence[Variant],
    open_mode: Callable[[Variant], AbstractContextManager[EngineMode]],
    n_new_tokens: int,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[ModeResult | Refused]:
    """Yield the result of each variant, with full mode first even if it was not requested.

    Texts are greedy, n_new_tokens long whatever would end them, and generated one at a time. `seed` determines the
    held-out texts that full mode writes, and the intervals.

    Raises: HeteroError: if full mode can't run.
    """
    params = SamplingParams(max_new_tokens=n_new_tokens, ignore_eos=True)
    ordered = [Variant(FULL), *(each for each in variants if each.mode != FULL)]
    reference: list[Written] = []
    with TemporaryFile() as kept:
        for number, variant in enumerate(ordered):
            with ExitStack() as stack:
                try:
                    mode = stack.enter_context(open_mode(variant))
                except HeteroError as error:
                    if number == 0:
                        raise
                    yield Refused(variant, str(error))
                    continue
                if progress is not None:
                    progress(f"Evaluating {variant.name}, {number + 1} of {len(ordered)}", 0, 0)
                if material.held_out is None:
                    material = _with_held_out(material, mode, replace(params, temperature=1.0, seed=seed))
                mode.generate(material.prompts[0], replace(params, max_new_tokens=WARM_UP_TOKENS))
                written = [mode.generate(prompt, params) for prompt in material.prompts]
                reference = reference or written
                n_changed = [mode.n_changed(*each) for each in zip(material.prompts, written, strict=True)]
                scored = _scored(mode, material, kept, is_reference=number == 0)
            yield _result(variant, written, reference, n_changed, scored, seed)


def _with_held_out(material: Material, mode: EngineMode, params: SamplingParams) -> Material:
    """Return the material with held-out texts that the mode writes after the prompts, each with its own seed."""
    texts = [
        (*prompt, *mode.generate(prompt, replace(params, seed=params.seed + number)).token_ids)
        for number, prompt in enumerate(material.prompts)
    ]
    return replace(material, held_out=tuple(texts))


def _scored(mode: EngineMode, material: Material, kept: IO[bytes], *, is_reference: bool) -> list[Scored]:
    """Score the held-out texts. `kept` stores the reference's fp32 logits in a file, since they can need as much memory
    as layers."""
    kept.seek(0)
    pairs = zip(material.prompts, material.held_out or (), strict=True)
    return [_scored_text(mode, text, len(prompt), kept, is_reference=is_reference) for prompt, text in pairs]


def _scored_text(mode: EngineMode, text: Ids, n_prompt: int, kept: IO[bytes], *, is_reference: bool) -> Scored:
    nats = kl_nats = depth_sum = 0.0
    for (given, depth), token_id in zip(mode.score(text, n_prompt), text[n_prompt:], strict=True):
        logits = reference = given.float().cpu()
        if is_reference:
            kept.write(logits.numpy().tobytes())
        else:
            reference = torch.from_numpy(np.frombuffer(kept.read(logits.nbytes), np.float32).copy())
        found = nats_and_divergence(logits, reference, token_id)
        nats, kl_nats, depth_sum = nats + found[0], kl_nats + found[1], depth_sum + depth
    return Scored(len(text) - n_prompt, nats, kl_nats, depth_sum)


def _result(
    variant: Variant,
    written: Sequence[Written],
    reference: Sequence[Written],
    n_changed: Sequence[int],
    scored: Sequence[Scored],
    seed: int,
) -> ModeResult:
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(written, reference, strict=True)]
    n_later = [len(each.token_ids) - 1 for each in written]
    divergences = [first_divergence(*pair) for pair in pairs]
    lengths = [max(map(len, pair)) for pair in pairs]
    words = [doubled_words(each.text) for each in written]
    n_scored = [each.n_tokens for each in scored]
    emulated = [each.emulated_s for each in written if each.emulated_s is not None]

    def over(wholes: Sequence[float], parts: Iterable[float]) -> Estimate | None:
        return ratio(list(parts), wholes, seed)

    before = [n if each is None else each for each, n in zip(divergences, lengths, strict=True)]
    return ModeResult(
        variant=variant,
        tokens_per_s=over([each.clock_s for each in written], n_later),
        emulated_tokens_per_s=over(emulated, n_later) if emulated else None,
        speedup=over([each.seconds for each in written], (each.seconds for each in reference)),
        identity=over(lengths, (n_equal(*pair) for pair in pairs)),
        tokens_before_divergence=over([1] * len(pairs), before),
        first_divergences=tuple(divergences),
        changed=over(n_later, n_changed),
        perplexity=ratio([each.nats for each in scored], n_scored, seed, np.exp),
        kl_nats=over(n_scored, (each.kl_nats for each in scored)),
        doubled_words=over([n for _, n in words], (n for n, _ in words)),
        mean_depth=over(n_later, (each.depth_sum for each in written)),
        scored_mean_depth=over(n_scored, (each.depth_sum for each in scored)),
        cpu_passes_per_token=over(n_later, (each.n_cpu_passes for each in written)),
    )
