"""A round of drafting: rows that have passed the earlier layers and wait, the last token's and one for each draft."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from hetero_ee.decoding.drafting import Drafting, ExitHead
from hetero_ee.decoding.sampling import RememberedNoise, SamplingParams, all_finite, choose_token
from hetero_ee.decoding.texts import Ending, Text, is_end_token
from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.planning.plan import CHAIN, EXIT
from hetero_ee.runtime.executor import Executor
from hetero_ee.runtime.rows import Rows


class _UnsoundLogitsError(Exception):
    """Leaves a source whose logits are not finite: it can't draft here."""


@dataclass(slots=True)
class DraftRound:
    """One text's round. token_ids: of its rows, the first the text's last token, the others drafts; of those the first
    n_kept rows will be verified, the rest is a chain that is not judged yet.

    hidden: (hidden,) at the boundary of each row that has got there. max_rows: the most that may wait. origins: of the
    drafts. asked: row -> what the gate was asked there, drafts with their confidences.
    """

    text: Text
    max_rows: int
    token_ids: list[int]
    origins: list[str]
    n_kept: int = 1
    hidden: list[Tensor] = field(default_factory=list)
    asked: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def first_position(self) -> int:
        return len(self.text.token_ids) - 1

    def rows(self, first: int) -> Rows:
        """Its rows from the first-th on."""
        return Rows.of_sequence(self.text.cached_as, self.first_position + first, self.token_ids[first:])

    @property
    def history(self) -> list[int]:
        """Every token up to the last row that is kept."""
        return [*self.text.token_ids, *self.token_ids[1 : self.n_kept]]


def stacked(states: Sequence[Tensor]) -> Tensor:
    """(hidden,) each -> (m, hidden). Where memory ran out in the middle of a round, they lie on two devices."""
    if len({state.device for state in states}) > 1:
        states = [state.cpu() for state in states]
    return torch.stack(list(states))


class Drafter:
    """Drafts for all texts in lockstep: their rows share each pass through the earlier layers.

    noise: that of the drafts' positions, for who chooses the tokens there.
    """

    def __init__(self, executor: Executor, drafting: Drafting, params: SamplingParams, ending: Ending) -> None:
        self._executor, self._drafting, self._params, self._ending = executor, drafting, params, ending
        self._exit_head = drafting.exit_head if drafting.boundary > 0 else None
        self.noise = RememberedNoise()
        self._was_noticed = False

    def draft(self, texts: Sequence[Text]) -> list[DraftRound]:
        """A round of each unfinished text, its rows at the boundary."""
        rounds = [self._begun(text) for text in texts]
        waiting = rounds
        while waiting:
            self._run_earlier(waiting)
            if self._exit_head is None:
                break
            waiting = self._judged(waiting, self._exit_head)
        return rounds

    def plain(self, texts: Sequence[Text]) -> list[DraftRound]:
        """The same without drafts: the last token's row of each text."""
        rounds = [DraftRound(text, 1, [text.token_ids[-1]], []) for text in texts]
        self._run_earlier(rounds)
        return rounds

    def _begun(self, text: Text) -> DraftRound:
        max_rows = min(self._drafting.draft_tokens, text.tokens_left(self._params, self._ending))
        chain = self._chain(text, max_rows - 1) if max_rows > 1 else []
        n_kept = 1 if self._exit_head else 1 + len(chain)
        return DraftRound(text, max_rows, [text.token_ids[-1], *chain], [CHAIN] * len(chain), n_kept)

    def _chain(self, text: Text, n_tokens: int) -> list[int]:
        """What the source proposes, up to a token that would end the text or that is none."""
        source, params = self._drafting.source, self._params
        if source is None:
            return []

        def choose(logits: Tensor, before: Sequence[int]) -> int:
            if not all_finite(logits):
                raise _UnsoundLogitsError
            return choose_token(logits, before, params, text.sequence, len(before), self.noise.of_draft)

        try:
            proposed = source.propose(text.cached_as, text.token_ids, n_tokens, choose)[:n_tokens]
        except (DeviceMemoryError, DeviceLostError) as error:
            self._notice(f"{error} This round has no drafts")
            return []
        except _UnsoundLogitsError:
            self._notice("the draft source's logits are not finite")
            return []
        chain: list[int] = []
        for token_id in proposed:
            if not 0 <= token_id < self._executor.spec.vocab_size:
                self._notice(f"the draft source proposes token {token_id}, which this model does not have")
                break
            if is_end_token(token_id, params, self._ending):
                break
            chain.append(token_id)
        return chain

    def _run_earlier(self, rounds: Sequence[DraftRound]) -> None:
        """What has not passed the earlier layers does so, in one pass."""
        parts = [round_.rows(len(round_.hidden)) for round_ in rounds]
        hidden = self._executor.run(Rows.joined(parts), None, range(self._drafting.boundary))
        for round_, states in zip(rounds, torch.split(hidden, [len(part) for part in parts]), strict=True):
            round_.hidden.extend(states)

    def _judged(self, rounds: Sequence[DraftRound], exit_head: ExitHead) -> list[DraftRound]:
        """Decides what follows each row from the last that is kept on; the rounds that have got another row to run."""
        open_rounds = [round_ for round_ in rounds if round_.n_kept < round_.max_rows]
        if not open_rounds:
            return []
        states = [round_.hidden[round_.n_kept - 1 : round_.max_rows - 1] for round_ in open_rounds]
        normed = self._executor.final_norm(stacked([state for mine in states for state in mine]))
        if exit_head.map is not None:
            normed = exit_head.map(normed)
        logits = self._executor.project(normed)
        sizes = [len(mine) for mine in states]
        parts = zip(open_rounds, torch.split(normed, sizes), torch.split(logits, sizes), strict=True)
        return [round_ for round_, mine, theirs in parts if self._goes_on(round_, exit_head, mine, theirs)]

    def _goes_on(self, round_: DraftRound, exit_head: ExitHead, normed: Tensor, logits: Tensor) -> bool:
        """Keeps as much of the chain as the gate lets pass, (n, hidden) and (n, vocab) being of the rows that judge it;
        then an exit may add a row. Whether it did."""
        for row_normed, row_logits in zip(normed, logits, strict=True):
            is_sound = all_finite(row_logits)
            if not is_sound:
                self._notice("exits' logits are not finite")
            confidence_of = partial(exit_head.confidence_of, row_normed, row_logits)
            has_next = round_.n_kept < len(round_.token_ids)
            if has_next and is_sound and self._passes(round_, round_.token_ids[round_.n_kept], confidence_of, CHAIN):
                round_.n_kept += 1
                continue
            self._drop_chain(round_)
            return is_sound and self._exits(round_, row_logits, confidence_of)
        return False

    def _exits(self, round_: DraftRound, logits: Tensor, confidence_of: Callable[[int, bool], float]) -> bool:
        """Whether the last row kept exits; its draft is the next row then."""
        history = round_.history
        noise = self.noise.of_draft
        token_id = choose_token(logits, history, self._params, round_.text.sequence, len(history), noise)
        if is_end_token(token_id, self._params, self._ending):
            return False  # right or wrong, no row behind it would count
        if not self._passes(round_, token_id, confidence_of, EXIT):
            return False
        round_.token_ids.append(token_id)
        round_.origins.append(EXIT)
        round_.n_kept += 1
        return True

    def _passes(
        self, round_: DraftRound, token_id: int, confidence_of: Callable[[int, bool], float], origin: str
    ) -> bool:
        """Asks the gate."""
        confidence = confidence_of(token_id, origin == EXIT)
        if not isfinite(confidence):
            self._notice("exits' confidences are not finite")
            return False
        round_.asked.setdefault(round_.n_kept - 1, []).append((token_id, confidence))
        return self._drafting.gate.goes_on(round_.text.cached_as, confidence, round_.n_kept)

    def _drop_chain(self, round_: DraftRound) -> None:
        """Forgets the rows behind those kept."""
        if round_.n_kept == len(round_.token_ids):
            return
        del round_.token_ids[round_.n_kept :], round_.hidden[round_.n_kept :], round_.origins[round_.n_kept - 1 :]
        self._executor.cache.truncate(round_.text.cached_as, round_.first_position + round_.n_kept)

    def _notice(self, what: str) -> None:
        if self._drafting.notice is not None and not self._was_noticed:
            self._drafting.notice(f"{what}; these tokens pass every layer one by one, as in mode full.")
        self._was_noticed = True
