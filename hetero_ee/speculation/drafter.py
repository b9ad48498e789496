"""Drafter: rounds of drafts for all texts, their rows sharing each pass through the earlier layers.

A row that exits at a level before the exit layer waits there. The row behind it begins again, and takes it along when
it gets there: both pass what is left in one pass, so that each layer reads its weights once for all that wait, and no
row attends before the keys and values of those before it are there. Source: derived, of rows that wait as in EE-LLM
(arXiv 2312.04916).
"""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from hetero_ee.decoding.sampling import RememberedNoise, SamplingParams, all_finite, choose_token
from hetero_ee.decoding.texts import Ending, Text, is_end_token
from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.draft_chain import DraftChain
from hetero_ee.speculation.draft_judge import Judge
from hetero_ee.speculation.draft_round import DraftRound, parted, stacked
from hetero_ee.speculation.drafting import Drafting


class _UnsoundLogitsError(Exception):
    """Leaves a source whose logits are not finite: it can't draft here."""


class Drafter:
    """Drafts for all texts in lockstep. noise: that of the drafts' positions, for who chooses the tokens there."""

    def __init__(self, executor: Executor, drafting: Drafting, params: SamplingParams, ending: Ending) -> None:
        self._executor, self._drafting, self._params, self._ending = executor, drafting, params, ending
        self.noise = RememberedNoise()
        self._judge = Judge(executor, drafting, params, ending, self.noise, self._warn)
        self._has_warned = False

    def draft(self, texts: Sequence[Text], begun: Mapping[int, tuple[Tensor, int]]) -> list[DraftRound]:
        """A round of each unfinished text, its rows at the exit layer.

        begun: by Text.sequence, of last tokens' rows that have begun already, states (hidden,) and the layers passed.
        """
        rounds = [self._begun(text, begun.get(text.sequence)) for text in texts]
        self._bring_to_exit_layer(rounds)
        return rounds

    def plain(self, texts: Sequence[Text]) -> list[DraftRound]:
        """The same without drafts: the last token's row of each text."""
        rounds = [DraftRound(text, 1, 0, [text.token_ids[-1]]) for text in texts]
        self._bring_to_exit_layer(rounds)
        return rounds

    def settle(self, round_: DraftRound, n_accepted: int, n_tokens: int) -> None:
        """The round was verified: its first n_accepted drafts were right, and it brought n_tokens."""
        self._judge.settle(round_, n_accepted, n_tokens)
        if round_.text.finished:
            self.noise.close(round_.text.sequence)

    def _begun(self, text: Text, begun: tuple[Tensor, int] | None) -> DraftRound:
        n_left = text.tokens_left(self._params, self._ending)
        max_rows = min(self._drafting.draft_length, n_left)
        n_judged = max_rows if self._drafting.drafts_ahead and max_rows < n_left else max_rows - 1
        making = DraftChain(partial(self._chosen, text), self._ends, self._drafting.chain_rule)
        chain = self._chain(text, max_rows - 1, making) if max_rows > 1 else []
        origins, depths = making.origins_of(len(chain)), [self._executor.spec.n_layers] * len(chain)
        token_ids = [text.token_ids[-1], *chain]
        round_ = DraftRound(text, max_rows, n_judged, token_ids, origins, depths, asked=making.asked)
        if begun is not None:
            round_.arrive(0, [begun[0]], begun[1])
        if not self._judge.is_wanted:
            round_.n_kept = len(round_.token_ids)
        round_.walk = self._judge.walk_of(round_)
        return round_

    def _chain(self, text: Text, n_tokens: int, making: DraftChain) -> list[int]:
        """What the source proposes, up to a token that would end the text or that is none."""
        source = self._drafting.source
        if source is None:
            return []
        try:
            proposed = source.propose(text.cached_as, text.token_ids, n_tokens, making.choose, making)[:n_tokens]
        except (DeviceMemoryError, DeviceLostError) as error:
            self._warn(f"{error} This round has no drafts")
            return []
        except _UnsoundLogitsError:
            self._warn("the draft source's logits are not finite")
            return []
        chain: list[int] = []
        for token_id in proposed:
            if not 0 <= token_id < self._executor.spec.vocab_size:
                self._warn(f"the draft source proposes token {token_id}, which this model does not have")
                break
            if self._ends(token_id):
                break
            chain.append(token_id)
        return chain

    def _chosen(self, text: Text, logits: Tensor, before: Sequence[int]) -> int:
        """The draft that the source's logits stand for."""
        if not all_finite(logits):
            raise _UnsoundLogitsError
        return choose_token(logits, before, self._params, text.sequence, len(before), self.noise.of_draft)

    def _ends(self, token_id: int) -> bool:
        return is_end_token(token_id, self._params, self._ending)

    def _bring_to_exit_layer(self, rounds: Sequence[DraftRound]) -> None:
        """Every row, judged where it is to be; the shallowest first, so that they are there when those before go on."""
        while walking := [round_ for round_ in rounds if not round_.is_drafted(self._drafting.exit_layer)]:
            depth = min(round_.front for round_ in walking)
            shallowest = [round_ for round_ in walking if round_.front == depth]
            ready = [round_ for round_ in shallowest if round_.is_ready]
            if ready:
                self._judge.judge(ready, depth)
            else:
                self._advance(shallowest, range(depth, self._next_stop(walking, depth)))

    def _next_stop(self, walking: Sequence[DraftRound], depth: int) -> int:
        """Where rows of this depth get to in one pass: where one of them is judged, or others are."""
        stops = [self._drafting.exit_layer]
        for round_ in walking:
            if round_.front > depth:
                stops.append(round_.front)
                continue
            stops += [n_passed for n_passed in round_.passed if n_passed > depth]
            if round_.walk is not None:
                stops.append(round_.walk.stops[0])
        return min(stops)

    def _advance(self, rounds: Sequence[DraftRound], layers: range) -> None:
        """The rounds' last rows, with those that wait where they are, through these layers in one pass."""
        firsts = [round_.first_moving for round_ in rounds]
        parts = [round_.rows(first) for round_, first in zip(rounds, firsts, strict=True)]
        states = [state for round_, first in zip(rounds, firsts, strict=True) for state in round_.hidden[first:]]
        hidden = self._executor.run(Batch.joined(parts), stacked(states) if states else None, layers)
        split = parted(hidden, [len(part) for part in parts])
        for round_, first, mine in zip(rounds, firsts, split, strict=True):
            round_.arrive(first, mine.unbind(), layers.stop)

    def _warn(self, what: str) -> None:
        if self._drafting.warn is not None and not self._has_warned:
            self._drafting.warn(f"{what}; these tokens pass every layer one by one, as in mode full.")
        self._has_warned = True
