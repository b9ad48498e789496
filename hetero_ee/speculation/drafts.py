"""One text's draft-verify step, and how the tokens of drafts are chosen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from hetero_ee.decoding.result import GRAMMAR
from hetero_ee.decoding.sampling import RememberedNoise, choose_token
from hetero_ee.decoding.texts import Text
from hetero_ee.runtime.choice import all_finite, confidence_of, without
from hetero_ee.runtime.drafted import ABSENT, NO_TOKEN, Drafted, DraftEnd, DraftNoise
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.waiting import WaitingToken


@dataclass(slots=True, eq=False)
class Branch:
    """A draft that may hang beside the sequence."""

    parent: "int | Branch"  # how many of the sequence's drafts come before it, or the branch that does
    token_id: int
    origin: str
    chance: float  # that it is right and all before it are
    node: int = -1  # its index among the step's tokens, once it is one


@dataclass(slots=True, eq=False)
class DraftStep:
    """What one text drafts and verifies in one go: a sequence of drafts, and branches that hang on it."""

    text: Text
    max_drafts: int  # of the sequence
    tokens: list[WaitingToken]  # what the cache lacks of the text, its last token, the sequence, then branches
    max_tokens: int = 0  # with branches
    origins: list[str] = field(default_factory=list)  # of each draft of the sequence: who made it
    chances: list[float] = field(default_factory=list)  # of each: that it is right if those before it are
    judged: dict[int, tuple[int, float]] = field(default_factory=dict)  # [i]: after tokens[i], drafted or not
    seconds: dict[int, Drafted] = field(default_factory=dict)  # [i]: what may come in that one's place
    candidates: list[Branch] = field(default_factory=list)  # branches that may be added
    branches: list[Branch] = field(default_factory=list)  # those that are
    next_guess: int | None = None  # likeliest token after the last one, though no draft was made of it
    root: int = field(init=False)  # index of the text's last token
    children: dict[int, list[int]] = field(init=False)  # of each token: those that follow it, in the order they came

    def __post_init__(self) -> None:
        self.root = len(self.tokens) - 1
        self.children = {parent: [parent + 1] for parent in range(self.root)}

    @property
    def history(self) -> list[int]:
        """Every token of the text, drafts included; before there are branches."""
        return [*self.text.token_ids, *(token.token_id for token in self.tokens[self.root + 1 :])]

    @property
    def end_of_sequence(self) -> int:
        """The index of its last token."""
        return self.root + len(self.origins)

    def origin(self, node: int) -> str:
        """Who made this draft."""
        place = node - self.root - 1
        drafts = len(self.origins)
        return self.origins[place] if place < drafts else self.branches[place - drafts].origin

    def child(self, node: int, token_id: int) -> int | None:
        """The token's draft after this one."""
        return next((each for each in self.children.get(node, ()) if self.tokens[each].token_id == token_id), None)

    def depth_first(self) -> list[int]:
        """The tokens' order in a pass: what came first of a token's drafts, the likeliest, last, so that the likeliest
        path's keys and values stay."""
        found, left = list[int](), [0]
        while left:
            found.append(left.pop())
            left += self.children.get(found[-1], ())
        return found

    @property
    def in_order(self) -> list[WaitingToken]:
        """The tokens in that order."""
        return [self.tokens[node] for node in self.depth_first()]

    def n_kept(self, path: Sequence[int]) -> int:
        """How many of the path's first tokens no later one of the pass has overwritten the keys and values of."""
        last = {self.tokens[node].position: node for node in self.depth_first()}
        return sum(1 for _ in takewhile(lambda node: last[self.tokens[node].position] == node, path))

    @property
    def has_room(self) -> bool:
        """Whether another draft may follow."""
        return len(self.origins) < self.max_drafts

    def end(self) -> None:
        """No draft may follow those that there are."""
        self.max_drafts = len(self.origins)

    def add(self, token_id: int, origin: str, chance: float) -> None:
        """A draft becomes the last token."""
        self._append(len(self.tokens) - 1, token_id)
        self.origins.append(origin)
        self.chances.append(chance)
        self.next_guess = None

    def add_branch(self, branch: Branch) -> None:
        """A branch after what it hangs on, which is there."""
        parent = branch.parent
        branch.node = self._append(parent.node if isinstance(parent, Branch) else self.root + parent, branch.token_id)
        self.branches.append(branch)

    def _append(self, parent: int, token_id: int) -> int:
        last, node = self.tokens[parent], len(self.tokens)
        self.tokens.append(WaitingToken(token_id, last.sequence, last.position + 1))
        self.children.setdefault(parent, []).append(node)
        return node

    def add_forced(self) -> bool:
        """Adds drafts that are certain, as the text's grammar leaves no choice: whether there are any. None may follow
        its end."""
        if self.text.constraint is None:
            return False
        forced = self.text.forced_after(self.history)[: self.max_drafts - len(self.origins)]
        for token_id in forced:
            self.add(token_id, GRAMMAR, 1.0)
        if self.text.is_complete_after(self.history):
            self.end()
        return bool(forced)

    def judge(self, token_id: int, confidence: float) -> None:
        """Keeps what was judged to follow the last token, drafted or not."""
        self.judged[len(self.tokens) - 1] = token_id, confidence


class DraftSampler:
    """Chooses drafts as the texts' sampling would: with the noise that verification will use at the same position."""

    def __init__(self) -> None:
        self.noise = RememberedNoise()

    def choose(self, text: Text, history: Sequence[int], logits: Tensor) -> int:
        """The token that `text` takes after this history, by logits (vocab,)."""
        noise, n_prompt_tokens, allowed = self.noise.of_draft, text.n_prompt_tokens, text.allowed_after(history)
        return choose_token(logits, history, text.params, text.sequence, len(history), noise, n_prompt_tokens, allowed)

    def drafted(
        self,
        executor: Executor,
        hidden: Tensor,
        end: DraftEnd,
        rows: Sequence[tuple[Text, Sequence[int]]],
        *,
        is_verified: bool = True,
    ) -> list[Drafted]:
        """What follows each of the states (m, hidden), those of texts with these histories.

        Chosen and judged on the GPU where the head lies there, unless penalties, a bias or a grammar change logits:
        then, and where the CPU has the logits anyway, just as the texts choose, filters included. So are tokens that
        nobody verifies.
        """
        by_gpu = executor.head_on_gpu and not any(
            text.params.changes_logits or text.constraint is not None for text, _ in rows
        )
        if by_gpu and (is_verified or not any(text.params.is_filtered for text, _ in rows)):
            return executor.draft(hidden, [self._noise_of(*row) for row in rows], end)
        logits = executor.draft_logits(hidden, end)
        if end.vocabulary is not None:
            whole = torch.full((len(logits), executor.spec.vocab_size), ABSENT)
            logits = whole.index_copy_(1, end.vocabulary.token_ids, logits)
        return [self._chosen(*row, end, each) for row, each in zip(rows, logits, strict=True)]

    def _noise_of(self, text: Text, history: Sequence[int]) -> DraftNoise:
        return DraftNoise(text.params.temperature, text.params.seed, text.sequence, len(history))

    def _chosen(self, text: Text, history: Sequence[int], end: DraftEnd, logits: Tensor) -> Drafted:
        if not all_finite(logits):
            return Drafted(NO_TOKEN, math.nan)
        token_id = self.choose(text, history, logits)
        allowed = text.allowed_after(history)
        if allowed is not None and end.judge is None:  # a judge knows the model's own logits alone
            logits = logits.masked_fill(torch.from_numpy(~allowed), ABSENT)
        found, others, left = Drafted(token_id, confidence_of(logits, token_id, end.judge)), list[Drafted](), logits
        while len(others) < end.n_choices - 1:
            left = without(left, token_id)
            token_id = self.choose(text, history, left)
            others.append(Drafted(token_id, confidence_of(left, token_id, end.judge)))
        return found._replace(others=tuple(others))
