"""Exact early exit: tokens are drafted after some of the layers and verified by all, several in one pass.

A round of each text: the row of its last token, and rows of drafts behind it, pass layers 0..G-1 and wait; one pass of
all that wait through layers G..L-1 reads their weights once; the full logits of row j choose the token behind it with
that position's noise. Drafts that are that token are kept; the first that is not is corrected, and what came after it
is rolled back. The row that a round's end suggests may have begun meanwhile, see draft_ahead.py. Every token is thus
what full.py chooses, from the same bits. Source: LayerSkip (arXiv 2404.16710) and EE-LLM (arXiv 2312.04916) for rows
that wait; derived for the shared noise.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.decoding.sampling import SamplingParams, all_finite
from hetero_ee.decoding.texts import Ending, Text, in_own_sequences, prefill, step
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.draft_ahead import DraftAhead
from hetero_ee.speculation.draft_round import DraftRound, parted
from hetero_ee.speculation.drafter import Drafter
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.text.text_stream import Decode


def generate_exact(
    executor: Executor,
    prompts: list[list[int]],
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
    drafting: Drafting,
    counts: DraftCounts | None = None,
) -> Iterator[GeneratedToken]:
    """Yields the tokens that full.generate yields, each text's in the same order; texts take turns by rounds.

    counts: counts them. Closing the iterator frees the sequences' memory. Raises UsageError for an exit layer that the
    model does not have.
    """
    start_s = clock()
    texts = [Text.of_prompt(sequence, ids, params, decode) for sequence, ids in enumerate(prompts)]
    decoding = _ExactDecoding(executor, params, ending, drafting, counts or DraftCounts(), lambda: clock() - start_s)
    yield from in_own_sequences(executor, texts, decoding.tokens(texts), drafting.source)


def generate_exact_from(
    executor: Executor,
    sequence: int,
    prompt_ids: list[int],
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
    drafting: Drafting,
    counts: DraftCounts | None = None,
) -> Iterator[GeneratedToken]:
    """Yields what generate_exact yields for this one prompt, whose first tokens lie in the KV cache already.

    sequence: its number there, with full.generate_from's promises. Where there is a draft source, it has observed what
    the cache holds; the sequence stays open there too.
    """
    start_s = clock()
    text = Text.of_prompt(0, prompt_ids, params, decode, cached_as=sequence)
    decoding = _ExactDecoding(executor, params, ending, drafting, counts or DraftCounts(), lambda: clock() - start_s)
    if drafting.source is not None:
        drafting.source.truncate(sequence, executor.cache.length(sequence))
    yield from decoding.tokens([text])


class _ExactDecoding:
    """Everything of one call but its texts."""

    def __init__(
        self,
        executor: Executor,
        params: SamplingParams,
        ending: Ending,
        drafting: Drafting,
        counts: DraftCounts,
        elapsed_s: Callable[[], float],
    ) -> None:
        drafting.check_exit_layer(executor.spec.n_layers)
        self._executor, self._params, self._ending = executor, params, ending
        self._drafting, self._counts, self._elapsed_s = drafting, counts, elapsed_s
        self._drafter = Drafter(executor, drafting, params, ending)
        self._ahead = DraftAhead(executor, drafting, params, ending, counts)

    def tokens(self, texts: list[Text]) -> Iterator[GeneratedToken]:
        """The loop; whenever it ends, no row is left ahead of the texts."""
        try:
            yield from self._tokens(texts)
        finally:
            self._ahead.drop(texts)

    def _tokens(self, texts: list[Text]) -> Iterator[GeneratedToken]:
        """The rest of each prompt, a token of each, then rounds."""
        logits_of = [self._prefilled(text) for text in texts]
        for text, logits in zip(texts, logits_of, strict=True):
            yield step(text, logits, self._params, self._ending, self._elapsed_s())
        while active := [text for text in texts if not text.finished]:
            pace, start_s = self._drafting.pace, self._elapsed_s()
            rounds = self._drafted(active) if pace is None or pace.drafts else self._plain(active)
            normed, logits_of = self._run_later(rounds)
            n_tokens, waited_s = 0, 0.0  # for whoever takes the tokens
            for each in zip(rounds, normed, logits_of, strict=True):
                tokens = self._verified(*each)
                n_tokens, given_s = n_tokens + len(tokens), self._elapsed_s()
                yield from tokens
                waited_s += self._elapsed_s() - given_s
            if pace is not None:
                pace.ended(self._elapsed_s() - start_s - waited_s, n_tokens)

    def _prefilled(self, text: Text) -> Tensor:
        if self._drafting.source is None:
            return prefill(self._executor, text)
        return prefill(self._executor, text, self._observe)

    def _drafted(self, texts: list[Text]) -> list[DraftRound]:
        return self._drafter.draft(texts, self._ahead.take())

    def _plain(self, texts: list[Text]) -> list[DraftRound]:
        self._ahead.drop(texts)
        return self._drafter.plain(texts)

    def _run_later(self, rounds: list[DraftRound]) -> tuple[list[Tensor], list[Tensor]]:
        """All waiting rows through the later layers and the head: final normed states and logits of each round's."""
        normed = self._executor.final_norm(self._ahead.run_later(rounds))
        logits = self._executor.lm_head(normed)
        self._counts.n_passes += 1
        sizes = [len(round_.token_ids) for round_ in rounds]
        return [*parted(normed, sizes)], [*parted(logits, sizes)]

    def _verified(self, round_: DraftRound, normed: Tensor, logits: Tensor) -> list[GeneratedToken]:
        """The tokens that the rows bring, up to the first wrong draft's correction; everything else rolled back."""
        text, n_rows, first_position = round_.text, len(round_.token_ids), round_.first_position
        tokens: list[GeneratedToken] = []
        n_accepted = 0
        for row in range(n_rows):
            # A row that full.py would fail at is left for a round of its own, behind the tokens that come before.
            if row > 0 and not all_finite(logits[row]):
                break
            noise = self._drafter.noise.of_token
            tokens.append(step(text, logits[row], self._params, self._ending, self._elapsed_s(), noise))
            token_id = tokens[-1].token_id
            for asked_id, confidence in round_.asked.get(row, ()):
                self._drafting.gate.audit(confidence, asked_id == token_id)
            is_right = row + 1 < n_rows and round_.token_ids[row + 1] == token_id
            n_accepted += is_right
            if text.finished or not is_right:
                break
        self._roll_back(text, first_position, normed)
        self._drafting.gate.settle(n_rows, len(tokens))
        self._counts.add_round(round_.origins, round_.depths, n_accepted, len(tokens))
        self._drafter.settle(round_, n_accepted, len(tokens))
        return tokens

    def _roll_back(self, text: Text, first_position: int, normed: Tensor) -> None:
        """Keeps of the round's rows those of the text's tokens, all but its last, unless that one's is ahead."""
        n_true = len(text.token_ids) - 1
        if not self._ahead.keeps(text):
            self._executor.cache.truncate(text.cached_as, n_true)
        if self._drafting.source is None:
            return
        token_ids = text.token_ids[first_position:n_true]
        self._observe(Batch.of_sequence(text.cached_as, first_position, token_ids), normed[: len(token_ids)])

    def _observe(self, batch: Batch, normed: Tensor) -> None:
        """Tells the source of verified rows of one sequence in place of what it has guessed there."""
        if self._drafting.source is not None:
            sequence, first_position = batch.sequences[0], batch.positions[0]
            self._drafting.source.truncate(sequence, first_position)
            self._drafting.source.observe(sequence, first_position, batch.token_ids, normed.cpu())
