"""Compares the predictions of two models on a text: what quantization costs, with error bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetero_ee.config import Progress
from hetero_ee.errors import ModelError, UsageError
from hetero_ee.evaluation.metrics import Estimate, ratio
from hetero_ee.hub.config_file import read_spec
from hetero_ee.quality.streamed import Ids, StreamedModel, opened
from hetero_ee.quality.texts import own_windows, text_windows
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.quantizers import Workers
from hetero_ee.weights.store.conversion import worker_threads
from hetero_ee.weights.store.reader import is_store
from hetero_ee_profiles.host.process import usable_threads

COMPARED_TOKENS = 8192
LOGITS_TOKENS = 64  # tokens whose logits of both models are in memory: 0.5 GB for a vocabulary of 256k
PASSING = "Comparing on {n_tokens:,} tokens, {name}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of model B from model A on a text, each with an interval over its windows.

    Both models are computed in fp32 from their dequantized weights, so that only the weights differ.
    """

    n_tokens: int
    kl_nats: Estimate  # mean KL(A || B) of the next-token distributions
    kl_nats_99: float  # 99th percentile over tokens
    same_top1: Estimate  # share of tokens at which both models have the same likeliest token
    perplexity_a: Estimate
    perplexity_b: Estimate
    perplexity_ratio: Estimate  # B over A


@dataclass(frozen=True, slots=True)
class WindowSums:
    """One window's sums over its tokens."""

    n_tokens: int
    kl_nats: list[float]
    n_same: int
    nats_a: float
    nats_b: float


def compare(
    a: Path,
    b: Path,
    texts: Sequence[str] | None = None,
    *,
    n_tokens: int = COMPARED_TOKENS,
    threads: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the model in folder `b` with the one in folder `a`; each is a checkpoint or a store.

    Memory holds one block's weights in fp32, both models' hidden states, and both heads.

    Args:
        texts: texts to predict, None for texts that one of the models writes, which has to be a store.
        seed: determines the resampled windows of the intervals.

    Raises:
        UsageError: if the vocabularies differ, or there is too little text.
        ModelError: if a model computes NaN.
        HeteroError: if a model can't be read.
    """
    threads = usable_threads(threads)
    with worker_threads(threads) as workers:
        sizes = [read_spec(folder).vocab_size for folder in (a, b)]
        if len(set(sizes)) > 1:
            both = " and ".join(f"{size} ({each.name})" for size, each in zip(sizes, (a, b), strict=True))
            raise UsageError(f"the vocabularies have {both} tokens; compare two versions of one model.")
        windows = _windows(a, b, texts, n_tokens, threads, progress)
        passed_a, passed_b = (_passed(folder, windows, workers, progress) for folder in (a, b))
        return compared(window_sums(passed_a, passed_b, windows), seed)


def _windows(
    a: Path, b: Path, texts: Sequence[str] | None, n_tokens: int, threads: int, progress: Progress | None
) -> Sequence[Ids]:
    if texts is not None:
        return text_windows(Tokenizer.load(a, read_spec(a).vocab_size), texts, n_tokens)
    stores = [folder for folder in (b, a) if is_store(folder)]
    if not stores:
        raise UsageError("neither model is a store, so none writes a text quickly; give one with --text.")
    return own_windows(stores[0], n_tokens, threads, progress)


def _passed(folder: Path, windows: Sequence[Ids], workers: Workers, progress: Progress | None) -> StreamedModel:
    """Pass the windows through all layers of a model."""
    model = StreamedModel(*opened(folder), windows, workers)
    blocks, n_predicted = model.layer_blocks(), model.n_tokens - len(windows)
    for n_done, block in enumerate(blocks):
        if progress:
            progress(PASSING.format(n_tokens=n_predicted, name=folder.name), n_done, len(blocks))
        model.pass_block(block, model.weights([block]))
    return model


def window_sums(a: StreamedModel, b: StreamedModel, windows: Sequence[Ids]) -> list[WindowSums]:
    """Compare the predictions of models whose states have passed all layers, for each window of their texts."""
    pairs, found = zip(a.logits(LOGITS_TOKENS), b.logits(LOGITS_TOKENS), strict=True), list[WindowSums]()
    for window in windows:
        kl_nats, n_same, nats_a, nats_b = list[float](), 0, 0.0, 0.0
        while len(kl_nats) < len(window) - 1:
            (logits_a, targets), (logits_b, _) = next(pairs)
            ours, theirs = _log_probabilities(logits_b), _log_probabilities(logits_a)
            kl_nats += (theirs.exp() * (theirs - ours)).nan_to_num(0.0).sum(-1).clamp_min(0.0).tolist()
            n_same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            nats_a, nats_b = nats_a + _nats(theirs, targets), nats_b + _nats(ours, targets)
        found.append(WindowSums(len(window) - 1, kl_nats, n_same, nats_a, nats_b))
    return found


def _log_probabilities(logits: Tensor) -> Tensor:
    if torch.isnan(logits).any():
        raise ModelError("the model computes NaN logits; its weights are damaged or beyond the range of its numbers.")
    return torch.log_softmax(logits.double(), -1)


def _nats(log_probabilities: Tensor, targets: Tensor) -> float:
    return -float(log_probabilities.gather(1, targets[:, None]).sum())


def compared(sums: Sequence[WindowSums], seed: int) -> Comparison:
    """Return the figures of all windows together, with intervals that depend on the seed."""
    wholes = [each.n_tokens for each in sums]
    kl_nats = [each.kl_nats for each in sums]

    def over(parts: Sequence[float], *, is_log: bool = False) -> Estimate:
        found = ratio(parts, wholes, seed, np.exp) if is_log else ratio(parts, wholes, seed)
        assert found is not None, "windows have tokens"
        return found

    return Comparison(
        n_tokens=sum(wholes),
        kl_nats=over([sum(each) for each in kl_nats]),
        kl_nats_99=float(np.quantile(np.concatenate(kl_nats), 0.99)),
        same_top1=over([each.n_same for each in sums]),
        perplexity_a=over([each.nats_a for each in sums], is_log=True),
        perplexity_b=over([each.nats_b for each in sums], is_log=True),
        perplexity_ratio=over([each.nats_b - each.nats_a for each in sums], is_log=True),
    )
