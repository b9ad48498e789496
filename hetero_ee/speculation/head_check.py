"""The self-check of a draft head that was named without measured acceptance: made once, then kept in the cache."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

from hetero_ee.errors import HeteroError
from hetero_ee.hub.model_files import CONFIG_FILE, SINGLE_FILE
from hetero_ee.hub.regular_file import find_file, read_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import EARLY_EXIT_MODES
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.opening import DraftKnowledge, Warn
from hetero_ee.speculation.sources.draft_head_file import draft_head_facts, read_draft_head
from hetero_ee.speculation.sources.self_check import check_head
from hetero_ee_profiles.records import write_whole

FOLDER = "draft_heads"  # in the cache
MAX_KEPT_BYTES = 2**16
OPENING = "It was a quiet morning in the old town, and"  # what the model writes on from


class HeadChecks:
    """Self-checks of heads for one model, in this cache folder. quantizer: of its weights."""

    def __init__(self, cache: Path, spec: ModelSpec, quantizer: str, warn: Warn) -> None:
        self._folder, self._spec, self._quantizer, self._warn = cache / FOLDER, spec, quantizer, warn

    def known(self, knowledge: DraftKnowledge) -> DraftKnowledge:
        """With what was found before, where it is needed."""
        if knowledge.draft_head is None or not self.is_missing(knowledge, None):
            return knowledge
        kept = _acceptance(self._file(knowledge.draft_head))
        return replace(knowledge, acceptance=kept) if kept else knowledge

    def is_missing(self, knowledge: DraftKnowledge, mode: str | None) -> bool:
        """Whether drafts of a named head may be wanted and nobody knows how good they are."""
        if knowledge.draft_head is None or not knowledge.is_asked or knowledge.acceptance:
            return False
        if mode == "full" or mode in EARLY_EXIT_MODES:
            return False
        return not draft_head_facts(knowledge.draft_head, self._spec).acceptance

    def checked(self, knowledge: DraftKnowledge, executor: Executor, prompt: list[int]) -> DraftKnowledge:
        """With what this model says of the head now; a remark says it too, and a warning that it sees the wrong
        layers. What can't be checked for want of memory, say, is used without."""
        folder = knowledge.draft_head
        assert folder is not None, "there is a head to check"
        try:
            head = read_draft_head(folder, self._spec)
            found = check_head(head, executor, prompt)
        except HeteroError as error:
            self._warn(f"{error} The draft head was not checked.")
            return knowledge
        shares = ", ".join(f"{share:.2f}" for share in found.acceptance)
        self._warn(
            f"Checked the draft head {folder.name} on {found.n_tokens} tokens: drafts right by position {shares}"
        )
        if head.eagle3 is not None and (wrong := found.warning(str(folder), head.eagle3.captured)):
            self._warn(wrong)
        else:
            self._keep(folder, found.acceptance)
        return replace(knowledge, acceptance=found.acceptance)

    def _keep(self, head: Path, acceptance: tuple[float, ...]) -> None:
        file = self._file(head)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(json.dumps({"acceptance": acceptance}), file)
        except OSError:
            return  # it is checked again

    def _file(self, head: Path) -> Path:
        """By the head's files and the model."""
        config, weights = find_file(head, CONFIG_FILE), find_file(head, SINGLE_FILE)
        parts = [json.dumps(asdict(self._spec), default=str, sort_keys=True), self._quantizer]
        parts += [f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in (config, weights) if file is not None]
        return self._folder / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}.json"


def _acceptance(file: Path) -> tuple[float, ...]:
    """What a kept file says; nothing where it is missing or damaged."""
    try:
        values = json.loads(read_file(file, MAX_KEPT_BYTES, "a self-check"))["acceptance"]
        found = tuple(float(share) for share in values)
    except (HeteroError, OSError, ValueError, TypeError, KeyError):
        return ()
    return found if all(0 <= share <= 1 for share in found) else ()
