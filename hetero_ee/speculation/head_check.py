"""Checks a draft head or draft model against its model: how often drafts are right, and which layers a head reads.

The check uses text that the model writes. Publishers count captured layers in two ways, and a head that reads the wrong
ones drafts as badly as an untrained one. So the first drafts are also tried with the states of one layer earlier and
one later. A head whose acceptance was not measured is checked once, and the result is kept in the cache. Source:
derived.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.hub.model_files import CONFIG_FILE, SINGLE_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.kv.batch import Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import EARLY_EXIT_MODES, MTP_HEAD
from hetero_ee.runtime.devices.cpu import host_machine
from hetero_ee.runtime.drafted import Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.opening import DraftKnowledge, Warn
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_layer import EMBEDDING, DraftHead, DraftHeadLayer
from hetero_ee.speculation.sources.draft_head_opening import head_on_cpu, head_parts
from hetero_ee.speculation.sources.draft_model import DraftModelSource
from hetero_ee.speculation.sources.draft_model_opening import DraftModel, DraftModelOpener
from hetero_ee.speculation.sources.eagle3 import LAYER_IDS
from hetero_ee.speculation.sources.head_source import head_facts, head_title, read_head
from hetero_ee.speculation.sources.source import Choose, DraftsFromStates, DraftSource
from hetero_ee_profiles.records import read_record, write_record

FOLDER = "draft_heads"  # in the cache
OPENING = "It was a quiet morning in the old town, and"  # text that the model continues
N_WRITTEN, N_DRAFTS = 64, 4  # tokens that the model writes; drafts after each
OFFSETS = (-1, 0, 1)
CLEARLY = 2.0  # standard errors


@dataclass(frozen=True, slots=True)
class KeptAcceptance:
    """Cached result of a self-check: the share of accepted drafts, by position."""

    acceptance: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.acceptance):
            raise ValueError(f"acceptance is {self.acceptance}, expected shares")


class HeadChecks:
    """Self-checks of draft heads for the model in a folder and the quantizer of its weights, kept in a cache."""

    def __init__(self, cache: Path, model: Path, spec: ModelSpec, quantizer: str, warn: Warn) -> None:
        self._folder, self._model, self._spec = cache / FOLDER, model, spec
        self._quantizer, self._warn = quantizer, warn

    def known(self, knowledge: DraftKnowledge) -> DraftKnowledge:
        """Add the acceptance found by an earlier check if a head's acceptance is missing."""
        if not self._is_unknown(knowledge):
            return knowledge
        kept = _acceptance(self._file(knowledge))
        return replace(knowledge, acceptance=kept) if kept else knowledge

    def is_missing(self, knowledge: DraftKnowledge, mode: str | None) -> bool:
        """Return whether the caller named something that may draft in this mode although its acceptance is unknown."""
        drafts = mode != "full" and mode not in EARLY_EXIT_MODES
        return knowledge.is_asked and drafts and self._is_unknown(knowledge)

    def _is_unknown(self, knowledge: DraftKnowledge) -> bool:
        """Return whether there is something that drafts, and its acceptance is unknown."""
        if knowledge.acceptance:
            return False
        head = knowledge.draft_head
        return knowledge.draft_model is not None if head is None else not head_facts(head, self._spec).acceptance

    def checked(self, knowledge: DraftKnowledge, executor: Executor, prompt: list[int]) -> DraftKnowledge:
        """Check the head or draft model with this model and add its acceptance.

        A notice reports the acceptance, and a warning reports a head that reads the wrong layers. A head that can't be
        checked, for example for lack of memory, is used unchecked.
        """
        try:
            name, found, head = self._check(knowledge, executor, prompt)
        except HeteroError as error:
            self._warn(f"{error} The drafts were not checked.")
            return knowledge
        shares = ", ".join(f"{share:.2f}" for share in found.acceptance)
        self._warn(f"Checked {name} on {found.n_tokens} tokens: drafts right by position {shares}")
        captured = () if head is None else head.dialect.captured
        if captured and (wrong := found.warning(str(knowledge.draft_head), captured)):
            self._warn(wrong)
        else:
            self._keep(knowledge, found.acceptance)
        return replace(knowledge, acceptance=found.acceptance)

    def _check(
        self, knowledge: DraftKnowledge, executor: Executor, prompt: list[int]
    ) -> "tuple[str, HeadCheck, DraftHead | None]":
        if (name := knowledge.draft_head) is not None:
            head = read_head(name, executor)
            return head_title(name), check_head(head, executor, prompt), head
        assert knowledge.draft_model is not None, "there is something to check"
        model = knowledge.draft_model
        return f"the draft model {model.name}", check_draft_model(model, executor, prompt), None

    def _keep(self, knowledge: DraftKnowledge, acceptance: tuple[float, ...]) -> None:
        with suppress(OSError):  # then it is checked again
            write_record(KeptAcceptance(acceptance), self._file(knowledge))

    def _file(self, knowledge: DraftKnowledge) -> Path:
        """Return the path of a check's result. Its name is a hash of the model and of what drafts for it."""
        parts = [json.dumps(asdict(self._spec), default=str, sort_keys=True), self._quantizer]
        if (model := knowledge.draft_model) is not None:
            parts += [json.dumps(asdict(model.spec), default=str, sort_keys=True), model.name, model.weights.quantizer]
        if (head := knowledge.draft_head) == MTP_HEAD:
            parts.append(str(self._model.resolve()))
        elif head is not None:
            head = Path(head)
            files = find_file(head, CONFIG_FILE), find_file(head, SINGLE_FILE)
            parts += [f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in files if file is not None]
        return self._folder / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}.json"


def _acceptance(file: Path) -> tuple[float, ...]:
    try:
        return read_record(KeptAcceptance, file).acceptance
    except (OSError, ValueError):
        return ()


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """Result of a check. acceptance is, by position, the share of right drafts among those after right drafts only.
    first_drafts is the share of right first drafts by layer offset; EAGLE-1 heads only have offset 0."""

    n_tokens: int
    acceptance: tuple[float, ...]
    first_drafts: Mapping[int, float]

    @property
    def better_offset(self) -> int:
        """The layer offset with clearly more right first drafts than offset 0, or 0 if there is none."""
        here = self.first_drafts[0]
        best = max(self.first_drafts, key=self.first_drafts.__getitem__)
        there = self.first_drafts[best]
        error = math.sqrt((here * (1 - here) + there * (1 - there)) / self.n_tokens)
        return best if there - here > CLEARLY * error else 0

    def warning(self, name: str, captured: Sequence[int]) -> str | None:
        """Return a warning if the head reads the wrong layers, else None."""
        offset = self.better_offset
        if not offset:
            return None
        here, there = self.first_drafts[0], self.first_drafts[offset]
        return (
            f"{name} sees states before layers {list(captured)}, where {here:.0%} of its first drafts are right, and "
            f"one layer {'later' if offset > 0 else 'earlier'} {there:.0%} would be; change {LAYER_IDS} in its "
            "config.json."
        )


def check_head(head: DraftHead, executor: Executor, prompt: Sequence[int], n_tokens: int = N_WRITTEN) -> HeadCheck:
    """Check a draft head on text that the model writes. The model writes n_tokens greedily after the prompt and reads
    them once more. The head drafts on the CPU. The executor's captured layers are restored afterwards."""
    captures = executor.capturing
    try:
        tokens = written(executor, prompt, n_tokens)
        by_offset = _shifted(head, executor.spec.n_layers) if head.dialect.captured else {0: head}
        layers = sorted({layer for each in by_offset.values() for layer in each.dialect.captured})
        executor.capture(layers)
        normed, *states = _states(executor, tokens)
    finally:
        executor.capture(captures)
    found: dict[int, tuple[Tensor, int]] = {}
    for offset, each in by_offset.items():
        seen = [states[layers.index(layer)] for layer in each.dialect.captured]
        source, n_drafts = _on_cpu(each, executor, len(tokens)), N_DRAFTS if offset == 0 else 1
        right, tried = accepted(source, greedy_choice(executor), tokens, [normed, *seen], len(prompt), n_drafts)
        found[offset] = right / tried.clamp(min=1), int(tried[0])
    shares = {offset: float(share[0]) for offset, (share, _) in found.items()}
    return HeadCheck(found[0][1], tuple(found[0][0].tolist()), shares)


def check_draft_model(model: DraftModel, executor: Executor, prompt: Sequence[int]) -> HeadCheck:
    """Check a draft model, on the CPU, on N_WRITTEN tokens that the model writes greedily after the prompt."""
    tokens = written(executor, prompt, N_WRITTEN)
    source = DraftModelSource(DraftModelOpener(model, executor, None, lambda _: None), lambda _: None)
    right, tried = accepted(source, greedy_choice(executor), tokens, [], len(prompt), N_DRAFTS)
    shares = right / tried.clamp(min=1)
    return HeadCheck(int(tried[0]), tuple(shares.tolist()), {0: float(shares[0])})


def accepted(
    source: DraftSource,
    choose: Choose,
    tokens: Sequence[int],
    states: Sequence[Tensor],
    n_prompt: int,
    n_drafts: int,
    sequence: int = 0,
) -> tuple[Tensor, Tensor]:
    """Draft after every token of a sequence from its prompt's end on.

    Args:
        states: states of all tokens, see DraftSource.observe; empty if the source needs none.

    Returns:
        By position, the number of right drafts, and of drafts tried because all before them were right.
    """
    right, tried = torch.zeros(n_drafts), torch.zeros(n_drafts)
    for position in range(n_prompt, len(tokens) - 1):
        first = 0 if position == n_prompt else position - 1
        if states:
            source.observe(sequence, first, tokens[first:position], *(each[first:position] for each in states))
        with closing(source.drafts(sequence, tokens[: position + 1], choose)) as drafting:
            drafts = [draft.token_id for draft in islice(drafting, n_drafts)]
        true = tokens[position + 1 : position + 1 + len(drafts)]
        pairs = enumerate(zip(drafts, true, strict=False))
        n_right = next((index for index, pair in pairs if pair[0] != pair[1]), len(true))
        right[:n_right] += 1
        tried[: min(n_right + 1, len(true))] += 1
    source.close(sequence)
    return right, tried


def written(executor: Executor, prompt: Sequence[int], n_tokens: int) -> list[int]:
    """Return the prompt followed by the model's greedy continuation, n_tokens or as many as the context holds.

    Raises: UsageError: if the context holds too few of them to check drafts.
    """
    context_tokens, tokens = executor.cache.max_tokens, list(prompt)
    n_tokens = min(n_tokens, context_tokens - len(tokens))
    if n_tokens <= N_DRAFTS:
        raise UsageError(f"A context of {context_tokens} tokens is too short to check drafts.")
    sequence = executor.cache.open_new()
    try:
        logits = executor.prompt([Batch.of_sequence(sequence, 0, tokens, is_prompt=True)])
        for _ in range(n_tokens):
            tokens.append(int(logits.argmax()))
            logits = executor.logits(Batch.of_sequence(sequence, len(tokens) - 1, tokens[-1:]), [0])[0]
    finally:
        executor.cache.close(sequence)
    return tokens


def greedy_choice(executor: Executor) -> Choose:
    """Return a function that chooses the token with the head's largest logit."""

    def choose(state: Tensor, end: DraftEnd, history: Sequence[int], by: DraftsFromStates | None = None) -> Drafted:
        place = int((by or executor).draft_logits(state, end)[0].argmax())
        return Drafted(place if end.vocabulary is None else int(end.vocabulary.token_ids[place]), 1.0)

    return choose


def _states(executor: Executor, tokens: Sequence[int]) -> list[Tensor]:
    """Return the final normed states and the captured ones of all tokens, on the CPU."""
    sequence, size, parts = executor.cache.open_new(), executor.prompt_chunk_tokens, []
    try:
        for first in range(0, len(tokens), size):
            hidden = executor.hidden(Batch.of_sequence(sequence, first, list(tokens[first : first + size])))
            captured = executor.captured
            parts.append([executor.on_cpu(each).clone() for each in (executor.final_norm(hidden), *captured)])
    finally:
        executor.cache.close(sequence)
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _shifted(head: DraftHead, n_layers: int) -> dict[int, DraftHead]:
    """Return the head's variants by layer offset, without those that would read a layer that the model lacks."""
    found = {}
    for offset in OFFSETS:
        captured = tuple(layer + offset for layer in head.dialect.captured)
        if captured[0] >= 0 and captured[-1] < n_layers:
            found[offset] = replace(head, dialect=replace(head.dialect, captured=captured))
    return found


def _on_cpu(head: DraftHead, executor: Executor, n_tokens: int) -> DraftHeadSource:
    weights, vocabulary = head_parts(head, executor)
    on_cpu = head_on_cpu(head.spec, weights, n_tokens, executor.pool)
    embedding = weights.matrices.get(EMBEDDING)
    layer = DraftHeadLayer(on_cpu, head.spec, embedding, host_machine(), on_gpu=False, dialect=head.dialect)
    return DraftHeadSource(lambda: layer, executor, vocabulary)
