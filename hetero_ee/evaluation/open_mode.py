"""A mode that is ready to run: it continues prompts and predicts texts, so that evaluation can compare modes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from hetero_ee.decoding.scoring import n_changed, score
from hetero_ee.engine import Engine
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.speculation.early_exit import score_early
from hetero_ee.speculation.statistics import ExitCounts

FULL = "full"


@dataclass(frozen=True, slots=True)
class Variant:
    """A mode to evaluate. `risk` is None if the mode has none."""

    mode: str
    risk: float | None = None

    @property
    def detail(self) -> str:
        """Part of the name that distinguishes variants of one mode; may be empty."""
        return "" if self.risk is None else f"risk {self.risk:.3g}"

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.detail}" if self.detail else self.mode


@dataclass(frozen=True, slots=True)
class Written:
    """Text that a mode generated for one prompt. The numbers exclude its first token, which prefill produces."""

    token_ids: tuple[int, ...]
    text: str
    clock_s: float  # on this machine
    emulated_s: float | None  # on the emulated machine, if there is one
    depth_sum: float  # layers that tokens had passed when they were given out
    n_cpu_passes: float  # passes through the CPU's layers

    @property
    def seconds(self) -> float:
        """Seconds on the emulated machine if there is one, else on this machine."""
        return self.clock_s if self.emulated_s is None else self.emulated_s


class EngineMode:
    """The mode of an engine. Earlier prompts have no influence. `emulates`: whether the engine emulates a machine."""

    def __init__(self, engine: Engine, *, emulates: bool) -> None:
        self._engine, self._emulates = engine, emulates

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Written:
        tokens, times_s = [], []
        for token in self._engine.stream(list(prompt), params):
            tokens.append(token)
            times_s.append(time.perf_counter())
        n_later, elapsed_s = len(tokens) - 1, tokens[-1].elapsed_s - tokens[0].elapsed_s
        return Written(
            token_ids=tuple(token.token_id for token in tokens),
            text="".join(token.text for token in tokens),
            clock_s=times_s[-1] - times_s[0] if self._emulates else elapsed_s,
            emulated_s=elapsed_s if self._emulates else None,
            depth_sum=self._depth_sum(n_later),
            n_cpu_passes=self._cpu_passes(n_later),
        )

    def score(self, token_ids: Sequence[int], n_prompt_tokens: int) -> Iterator[tuple[Tensor, int]]:
        """Yield, for each token after the prompt, the logits (vocab,) that predict it in this mode and the layers
        passed. The KV cache is filled as it would be while generating in this mode."""
        executor, exits = self._engine.executor, self._engine.exits
        if exits is None:
            return score(executor, token_ids, n_prompt_tokens)  # exact gives out what full does
        return score_early(executor, token_ids, n_prompt_tokens, exits, ExitCounts())

    def n_changed(self, prompt: Sequence[int], written: Written) -> int:
        """Return how many tokens of a greedy text differ from the full model's choice after the same tokens."""
        return n_changed(self._engine.executor, [*prompt, *written.token_ids], len(prompt))

    def _depth_sum(self, n_tokens: int) -> float:
        exits = self._engine.exit_statistics
        return self._engine.spec.n_layers * n_tokens if exits is None else exits.mean_depth * exits.n_tokens

    def _cpu_passes(self, n_tokens: int) -> float:
        """Return the number of passes through a layer on the CPU, averaged over these layers."""
        engine = self._engine
        parts = () if engine.plan is None else engine.plan.parts  # all are the CPU's where nothing was planned
        layers = {part.layer for part in parts if part.layer is not None and part.decode_placement.uses_cpu}
        exits, drafts = engine.exit_statistics, engine.draft_statistics
        if parts and not layers:
            return 0.0
        if exits is not None:
            return exits.n_tokens * fmean(map(exits.passes_per_token, layers))
        return n_tokens if drafts is None else drafts.n_passes
