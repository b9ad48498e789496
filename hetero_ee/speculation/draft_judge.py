"""Judge: what follows a row, by what it looks like after some of the layers. Its answers change the speed, never a
token."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from hetero_ee.decoding.sampling import RememberedNoise, SamplingParams, all_finite, choose_token
from hetero_ee.decoding.texts import Ending, is_end_token
from hetero_ee.planning.plan import EXIT
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.draft_round import DraftRound, parted, stacked
from hetero_ee.speculation.drafting import Drafting, ExitHead, ExitLevel
from hetero_ee.speculation.exit_levels import ActiveLevels, Walk
from hetero_ee.speculation.sources.candidates import spread_out

UNSOUND_LOGITS = "exits' logits are not finite"


class Judge:
    """Of one call's texts. noise: of the drafts' positions. warn: told of what can't be judged; such rows wait at the
    exit layer and nothing follows them."""

    def __init__(
        self,
        executor: Executor,
        drafting: Drafting,
        params: SamplingParams,
        ending: Ending,
        noise: RememberedNoise,
        warn: Callable[[str], None],
    ) -> None:
        self._executor, self._drafting, self._params, self._ending = executor, drafting, params, ending
        self._noise, self._warn = noise, warn
        self._exit_head = drafting.exit_head if drafting.exit_layer > 0 else None
        levels = None if self._exit_head is None else drafting.levels
        self._levels = {} if levels is None else levels.by_exit_layer
        self._active = None if levels is None else ActiveLevels(levels, executor.spec.n_layers)

    @property
    def is_wanted(self) -> bool:
        """Whether rows are judged at all."""
        return self._exit_head is not None

    def walk_of(self, round_: DraftRound) -> Walk | None:
        """Where the round's last row kept is judged: at the exit layer alone where a chain hangs on it, or where no row
        has room behind it; at no level that it has passed already."""
        if self._exit_head is None or round_.n_kept > round_.n_judged:
            return None
        has_chain, has_room = round_.n_kept < len(round_.token_ids), round_.n_kept < round_.max_rows
        levels = []
        if self._active is not None and has_room and not has_chain:
            levels = [level for level in self._active.of(round_.text.sequence) if level >= round_.front]
        return Walk([*levels, self._drafting.exit_layer])

    def judge(self, rounds: Sequence[DraftRound], depth: int) -> None:
        """Decides what follows the last rows, which have got to an exit layer where they are judged."""
        if depth == self._drafting.exit_layer:
            self._judge_at_exit_layer(rounds)
            return
        level, walks = self._levels[depth], [(round_, round_.walk) for round_ in rounds if round_.walk is not None]
        known = [(round_, walk) for round_, walk in walks if walk.candidates is not None]
        first = [(round_, walk) for round_, walk in walks if walk.candidates is None]
        if first:
            self._judge_first(first, level)
        if known:
            self._judge_candidates(known, level)

    def settle(self, round_: DraftRound, n_accepted: int, n_tokens: int) -> None:
        """The round was verified: its first n_accepted drafts were right, and it brought n_tokens."""
        if self._active is None:
            return
        if round_.text.finished:
            self._active.close(round_.text.sequence)
        else:
            self._active.settle(round_.text.sequence, len(round_.depths), n_accepted, n_tokens)

    def _judge_first(self, walks: Sequence[tuple[DraftRound, Walk]], level: ExitLevel) -> None:
        """By the whole head; rows that do not exit take their candidates along."""
        states = stacked([round_.hidden[-1] for round_, _ in walks])
        normed, logits = self._projected(states, level.head)
        for (round_, walk), row_normed, row_logits in zip(walks, normed, logits, strict=True):
            if not self._is_sound(round_, row_logits):
                continue
            confidence = level.head.confidence_of(row_normed, row_logits, int(row_logits.argmax()), True)
            self._try(round_, walk, partial(_itself, row_logits), confidence, level.threshold)
            if round_.walk is walk and len(walk.stops) > 1:
                walk.take_candidates(row_logits)

    def _judge_candidates(self, walks: Sequence[tuple[DraftRound, Walk]], level: ExitLevel) -> None:
        """By the head's rows of their candidates alone."""
        assert level.sliced is not None, "ActiveLevels leaves out levels that can't judge candidates"
        token_ids = torch.stack([walk.candidates for _, walk in walks if walk.candidates is not None])
        normed = self._normed(stacked([round_.hidden[-1] for round_, _ in walks]), level.head)
        for (round_, walk), row in zip(walks, self._executor.partial_logits(normed, token_ids), strict=True):
            if not self._is_sound(round_, row) or walk.candidates is None or walk.softmax is None:
                continue
            confidence = level.sliced(row.numpy(), walk.softmax)
            among_all = partial(spread_out, row, walk.candidates, self._executor.spec.vocab_size)
            self._try(round_, walk, among_all, confidence, level.sliced_threshold)

    def _try(
        self, round_: DraftRound, walk: Walk, logits: Callable[[], Tensor], confidence: float, threshold: float
    ) -> None:
        """The last row exits where the level and the gate say so; else it goes on to where it is judged next. logits:
        (vocab,), made where they are needed."""
        depth = walk.stops.pop(0)
        if not self._is_number(round_, confidence) or confidence < threshold:
            return
        token_id = self._chosen(round_, logits())
        if not is_end_token(token_id, self._params, self._ending) and self._passes(round_, token_id, confidence):
            self._exit(round_, token_id, depth)

    def _judge_at_exit_layer(self, rounds: Sequence[DraftRound]) -> None:
        """By the whole head, whatever was seen before."""
        exit_head = self._exit_head
        assert exit_head is not None, "rows are judged where there is an exit head"
        states = [round_.hidden[round_.n_kept - 1 : round_.n_judged] for round_ in rounds]
        normed, logits = self._projected(stacked([state for mine in states for state in mine]), exit_head)
        sizes = [len(mine) for mine in states]
        for round_, mine, theirs in zip(rounds, parted(normed, sizes), parted(logits, sizes), strict=True):
            round_.walk = None
            self._end_chain(round_, exit_head, mine, theirs)

    def _end_chain(self, round_: DraftRound, exit_head: ExitHead, normed: Tensor, logits: Tensor) -> None:
        """Keeps as much of the chain as the gate lets pass, (n, hidden) and (n, vocab) being of the rows that judge it;
        then an exit may add a row."""
        for row in range(len(logits)):
            row_logits = logits[row]
            is_sound = self._is_sound(round_, row_logits)
            confidence_of = partial(exit_head.confidence_of, normed[row], row_logits)
            if is_sound and self._keeps_next(round_, confidence_of):
                continue
            self._drop_chain(round_)
            if is_sound:
                self._exit_or_guess(round_, row_logits, confidence_of)
            return

    def _keeps_next(self, round_: DraftRound, confidence_of: Callable[[int, bool], float]) -> bool:
        """Whether the chain's next row stays."""
        if round_.n_kept == len(round_.token_ids):
            return False
        token_id = round_.token_ids[round_.n_kept]
        confidence = confidence_of(token_id, False)
        if not self._is_number(round_, confidence) or not self._passes(round_, token_id, confidence):
            return False
        round_.n_kept += 1
        if self._active is not None:
            self._active.exited(round_.text.sequence, self._executor.spec.n_layers)
        return True

    def _exit_or_guess(self, round_: DraftRound, logits: Tensor, confidence_of: Callable[[int, bool], float]) -> None:
        """The last row kept exits at the exit layer; where it does not, its draft stays known."""
        token_id = self._chosen(round_, logits)
        if is_end_token(token_id, self._params, self._ending):
            return  # right or wrong, no row behind it would count
        round_.guess = token_id
        if round_.n_kept == round_.max_rows:
            return
        confidence = confidence_of(token_id, True)
        if self._is_number(round_, confidence) and self._passes(round_, token_id, confidence):
            self._exit(round_, token_id, self._drafting.exit_layer)

    def _exit(self, round_: DraftRound, token_id: int, depth: int) -> None:
        """The draft is the next row."""
        round_.add(token_id, EXIT, depth)
        round_.guess = None
        if self._active is not None:
            self._active.exited(round_.text.sequence, depth)
        round_.walk = self.walk_of(round_)

    def _passes(self, round_: DraftRound, token_id: int, confidence: float) -> bool:
        """Asks the gate."""
        round_.asked.setdefault(round_.n_kept - 1, []).append((token_id, confidence))
        return self._drafting.gate.goes_on(round_.text.cached_as, confidence, round_.n_kept)

    def _chosen(self, round_: DraftRound, logits: Tensor) -> int:
        """What the round's text takes behind its last row kept."""
        history, noise = round_.history, self._noise.of_draft
        return choose_token(logits, history, self._params, round_.text.sequence, len(history), noise)

    def _normed(self, states: Tensor, exit_head: ExitHead) -> Tensor:
        normed = self._executor.final_norm(states)
        return normed if exit_head.map is None else exit_head.map(normed)

    def _projected(self, states: Tensor, exit_head: ExitHead) -> tuple[Tensor, Tensor]:
        """(m, hidden) -> what the head multiplies (m, hidden), and logits (m, vocab)."""
        normed = self._normed(states, exit_head)
        return normed, self._executor.lm_head(normed)

    def _is_sound(self, round_: DraftRound, logits: Tensor) -> bool:
        """Whether they can be judged; if not, the round's last row is judged no more."""
        if all_finite(logits):
            return True
        self._warn(UNSOUND_LOGITS)
        round_.walk = None
        return False

    def _is_number(self, round_: DraftRound, confidence: float) -> bool:
        """The same of a confidence."""
        if isfinite(confidence):
            return True
        self._warn("exits' confidences are not finite")
        round_.walk = None
        return False

    def _drop_chain(self, round_: DraftRound) -> None:
        if round_.n_kept < len(round_.token_ids):
            round_.drop_chain()
            self._executor.cache.truncate(round_.text.cached_as, round_.first_position + round_.n_kept)


def _itself(logits: Tensor) -> Tensor:
    return logits
