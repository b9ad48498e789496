"""Certifies exits: continues prompts greedily at full depth, while every exit layer judges each token.

The exits are judged as in decoding: by the exit's map, head and predictor from the executor's own states, with
full-depth keys and values, as if skipped layers had caught up. The result depends only on the model, the exits, the
prompts and the KV type.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.stages import Chunk
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.config import Progress
from hetero_ee.decoding.loop import FullMode, Take, generate
from hetero_ee.decoding.requests import Ending, Request, step
from hetero_ee.decoding.scoring import n_changed
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import UNQUANTIZED
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.drafted import Drafted
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.early_exit import EarlyExitMode, EarlyExits
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import Certificate, CertifiedExit, OnPolicy, levels_of
from hetero_ee.speculation.pending import PendingToken, advance
from hetero_ee.speculation.policies.certified import Certified
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.speculation.policies.exit_head import ExitHeads, exit_heads
from hetero_ee.speculation.policies.policy import ExitPolicy
from hetero_ee.speculation.policies.specee import SpecEE
from hetero_ee.speculation.statistics import ExitCounts, ExitStatistics
from hetero_ee.weights.store.record import Arrays

ALGORITHM_VERSION = 3  # increases when the bytes or the steps change; runs of other versions are not resumed
N_PROMPTS = 1500
TOKENS_A_PROMPT = 64  # judged; prefill gives the token before them
GROUP_PROMPTS = 32  # prompts in one batch
CERTIFYING, FOLLOWING = "Certifying", "Following certified requests"
RISKS = (0.01, 0.02, 0.05)  # at which certified requests are followed
N_FOLLOWED = 2  # groups of prompts
N_TIMED = 3  # steps before the expected time is reported
PARAMS = SamplingParams(max_new_tokens=TOKENS_A_PROMPT + 1)
JUDGEMENTS, PROMPT_LENGTHS, N_TOKENS = "judgements", "prompt_lengths", "n_tokens"

PromptSource = Callable[[int], Sequence[Chunk]]  # prompts of the n-th group, none after the last
MAX_PENDING = 7  # pending tokens of a sequence
N_TEXTS, PROMPT_TOKENS, NEW_TOKENS = 16, 16, 64  # for measuring mode specee


def by_group(prompts: Sequence[Chunk]) -> PromptSource:
    """Return a source that splits known prompts into groups."""
    return lambda group: prompts[group * GROUP_PROMPTS :][:GROUP_PROMPTS]


def kv_type_of(executor: Executor) -> str:
    plan = getattr(executor, "plan", None)
    return cast(HostExecutor, executor).kv_type if plan is None else str(plan.kv_type)


class CertificateRun:
    """A run that makes a certificate. `steps` stores judged groups of prompts; `clock` returns seconds."""

    def __init__(
        self,
        executor: Executor,
        ending: Ending,
        calibration: Calibration,
        steps: KeptSteps | None,
        clock: Callable[[], float],
        progress: Progress | None = None,
    ) -> None:
        self._executor, self._ending, self._calibration = executor, ending, calibration
        compiled = executor.weights.quantizer != UNQUANTIZED
        self._heads = exit_heads(calibration, range(1, calibration.n_layers), compiled=compiled)
        self._steps, self._clock, self._progress = steps or KeptSteps(), clock, progress
        self._n_prompts, self._started_s, self._is_told = 0, 0.0, False

    def certify(self, prompts_of: PromptSource, n_prompts: int, key: str, description: str) -> Certificate:
        """Judge the prompts and return the certificate. Runs with the same identity need the same prompts.

        Raises: UsageError, StoreError, DiskFullError.
        """
        self._n_prompts, n_judged = n_prompts, 0
        groups = [_arrays_of([], [], len(self._heads))]
        while n_judged < n_prompts:
            make = partial(self._judged, prompts_of, len(groups) - 1, n_judged)
            groups.append(self._steps.once(f"group {len(groups) - 1}", make))
            if not len(groups[-1][N_TOKENS]):
                break
            n_judged += len(groups[-1][N_TOKENS])
        found = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
        prompt_lengths, n_tokens = (found[name].astype(np.uint16) for name in (PROMPT_LENGTHS, N_TOKENS))
        kv_type, digest = kv_type_of(self._executor), self._calibration.exits_digest
        certificate = Certificate(
            key, digest, kv_type, description, tuple(self._heads), prompt_lengths, n_tokens, found[JUDGEMENTS]
        )
        certificate = replace(certificate, activation_terms=self._executor.spec.activation_terms)
        return replace(certificate, on_policy=tuple(self._on_policy(certificate, prompts_of)))

    def _on_policy(self, certificate: Certificate, prompts_of: PromptSource) -> Iterator[OnPolicy]:
        """Decode the first groups of prompts in certified mode, and yield the counts for each certifiable risk.

        Risks at which no token exits at the middle exit layer are left out.
        """
        allowed = []
        for risk in RISKS:
            with suppress(UsageError):  # too few prompts for this risk
                allowed.append(certificate.certified_exit([self._calibration.n_layers // 2], risk))
        groups = [group for number in range(N_FOLLOWED) if (group := prompts_of(number))]
        for number, each in enumerate(allowed):
            if self._progress is not None:
                self._progress(FOLLOWING, number, len(allowed))
            counts = [self._followed(each, group) for group in groups if sum(each.shares) > 0]
            n_tokens, n_exited, n_different = map(sum, zip((0, 0, 0), *counts, strict=True))
            if n_tokens:  # otherwise every request ends at once
                yield OnPolicy(each.risk, each.exit_layers[0], n_tokens, n_exited, n_different)

    def _followed(self, allowed: CertifiedExit, prompts: Sequence[Chunk]) -> tuple[int, int, int]:
        """Decode in certified mode and return the numbers of tokens, of exits and of changed tokens."""
        [exit_layer] = allowed.exit_layers
        policy = Certified({exit_layer: self._heads[exit_layer].end}, allowed)
        requests, known = followed(self._executor, self._ending, policy, prompts, PARAMS)
        different = (
            n_changed(self._executor, request, len(prompt)) for request, prompt in zip(requests, prompts, strict=True)
        )
        return known.n_tokens, known.n_exited, sum(different)

    def _judged(self, prompts_of: PromptSource, group: int, n_before: int) -> Arrays:
        """Judge the tokens of a group of prompts, which follows n_before others. Sequences may end early."""
        self._started_s = self._clock()
        prompts = list(prompts_of(group))[: self._n_prompts - n_before]
        mode = _JudgingMode(self._executor, self._heads, lambda n_steps: self._tell(n_before, len(prompts), n_steps))
        asked = [list(prompt) for prompt in prompts]
        for _ in generate(self._executor, asked, PARAMS, self._ending, lambda ids: "", lambda: 0.0, mode):
            pass
        rows = [mode.rows.get(number, []) for number in range(len(prompts))]
        return _arrays_of(prompts, rows, len(self._heads))

    def _tell(self, n_before: int, n_together: int, n_steps: int) -> None:
        """Report the progress and, once the first steps were timed, the expected total time."""
        if self._progress is None:
            return
        if n_steps == N_TIMED and not self._is_told:
            self._is_told = True
            seconds = (self._clock() - self._started_s) * TOKENS_A_PROMPT / N_TIMED
            minutes = max(1, round(seconds * (self._n_prompts - n_before) / n_together / 60))
            of = f"{self._n_prompts - n_before:,} prompts with {TOKENS_A_PROMPT} tokens each"
            self._progress(
                f"Certifying {of} takes about {minutes} min; if interrupted, it resumes at the next call", 0, 0
            )
        n_done = n_before * TOKENS_A_PROMPT + n_steps * n_together
        self._progress(CERTIFYING, n_done, self._n_prompts * TOKENS_A_PROMPT)


class _JudgingMode(FullMode):
    """Full mode that records how each exit layer judges every token.

    `rows` has for each prompt, by its index, a row per token: twice the confidence's level, plus 1 if the exit is
    right.
    """

    def __init__(self, executor: Executor, heads: ExitHeads, tell: Callable[[int], None]) -> None:
        """Create the mode. `tell` is called after each step with the number of steps so far."""
        super().__init__(executor, lambda: 0.0)
        self._heads, self._tell, self._n_steps = heads, tell, 0
        self._sampler = DraftSampler()
        self.rows: dict[int, list[NDArray[np.uint8]]] = {}

    def advance(self, requests: Sequence[Request]) -> list[Take]:
        tokens = [
            PendingToken(request.token_ids[-1], request.kv_sequence, len(request.token_ids) - 1) for request in requests
        ]
        drafts = np.array([self._drafted(tokens, requests, exit_layer) for exit_layer in self._heads])
        final = advance(self._executor, tokens, self._executor.spec.n_layers)
        assert final is not None, "a model has a layer"
        levels = levels_of(drafts[:, :, 1])
        takes: list[Take] = []
        for row, (request, logits) in enumerate(zip(requests, self._executor.to_logits(final), strict=True)):
            token = step(request, logits, 0.0)
            judged = 2 * levels[:, row] + (drafts[:, row, 0] == token.token_id)
            self.rows.setdefault(request.index, []).append(judged)
            takes.append(partial(list, [token]))
        self._n_steps += 1
        self._tell(self._n_steps)
        return takes

    def _drafted(self, tokens: list[PendingToken], requests: Sequence[Request], exit_layer: int) -> list[Drafted]:
        """Return the token and confidence that the exit layer would choose after each sequence's last token."""
        hidden = advance(self._executor, tokens, exit_layer)
        assert hidden is not None, "an exit layer is after the embedding"
        rows = [(request, request.token_ids) for request in requests]
        return self._sampler.drafted(self._executor, hidden, self._heads[exit_layer].end, rows, is_verified=False)


def _arrays_of(prompts: Sequence[Chunk], rows: Sequence[Sequence[NDArray[np.uint8]]], n_exit_layers: int) -> Arrays:
    judged = [row for of_prompt in rows for row in of_prompt]
    return {
        JUDGEMENTS: np.array(judged, np.uint8).reshape(-1, n_exit_layers),
        PROMPT_LENGTHS: np.array([len(prompt) for prompt in prompts], np.int64),
        N_TOKENS: np.array([len(of_prompt) for of_prompt in rows], np.int64),
    }


def followed(
    executor: Executor,
    ending: Ending,
    policy: ExitPolicy,
    prompts: Sequence[Chunk],
    params: SamplingParams,
    draft: DraftCandidates | None = None,
) -> tuple[list[list[int]], ExitStatistics]:
    """Generate from the prompts with exact keys and values, in one batch. Return the sequences with their prompts."""
    texts, counts = [[*prompt] for prompt in prompts], ExitCounts()
    mode = EarlyExitMode(executor, EarlyExits(policy, MAX_PENDING, draft), counts, lambda: 0.0)
    asked = [[*prompt] for prompt in prompts]
    for token in generate(executor, asked, params, ending, lambda ids: "", lambda: 0.0, mode):
        texts[token.sequence].append(token.token_id)
    return texts, counts.statistics(executor.spec.n_layers)


def specee_depths(
    executor: Executor,
    ending: Ending,
    calibration: Calibration,
    chunks: Sequence[Chunk],
    draft: DraftCandidates | None = None,
) -> tuple[int, ...]:
    """Generate in mode specee, and count the tokens by the layers that they ran, 1 to all.

    Returns () if the calibration has no exit layers.

    Args:
        chunks: Chunks of text. The beginnings of some of them are the prompts.
        draft: Candidates that the calibration has exits for.
    """
    policy = SpecEE.of(calibration, draft, compiled=executor.weights.quantizer != UNQUANTIZED)
    if not policy.schedule:
        return ()
    prompts = [chunk[:PROMPT_TOKENS] for chunk in chunks[:N_TEXTS]]
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    _, found = followed(executor, ending, policy, prompts, params, draft)
    return found.depths[1:] if found.n_tokens else ()
