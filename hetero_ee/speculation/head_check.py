"""Self-check of a draft head without measured acceptance: done once, then kept in the cache."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hetero_ee.errors import HeteroError
from hetero_ee.hub.model_files import CONFIG_FILE, SINGLE_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import EARLY_EXIT_MODES
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.opening import DraftKnowledge, Warn
from hetero_ee.speculation.sources.draft_head_file import draft_head_facts, read_draft_head
from hetero_ee.speculation.sources.self_check import check_head
from hetero_ee_profiles.records import read_record, write_record

FOLDER = "draft_heads"  # in the cache
OPENING = "It was a quiet morning in the old town, and"  # that the model continues


@dataclass(frozen=True, slots=True)
class KeptAcceptance:
    """What is kept of a self-check: the share of drafts accepted, by position."""

    acceptance: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.acceptance):
            raise ValueError(f"acceptance is {self.acceptance}, expected shares")


class HeadChecks:
    """Self-checks of draft heads for one model, kept in a cache folder. quantizer: of the model's weights."""

    def __init__(self, cache: Path, spec: ModelSpec, quantizer: str, warn: Warn) -> None:
        self._folder, self._spec, self._quantizer, self._warn = cache / FOLDER, spec, quantizer, warn

    def known(self, knowledge: DraftKnowledge) -> DraftKnowledge:
        """Add the acceptance found by an earlier check, if it is needed."""
        if knowledge.draft_head is None or not self.is_missing(knowledge, None):
            return knowledge
        kept = _acceptance(self._file(knowledge.draft_head))
        return replace(knowledge, acceptance=kept) if kept else knowledge

    def is_missing(self, knowledge: DraftKnowledge, mode: str | None) -> bool:
        """Return whether a named head may draft although its acceptance is not known."""
        if knowledge.draft_head is None or not knowledge.is_asked or knowledge.acceptance:
            return False
        if mode == "full" or mode in EARLY_EXIT_MODES:
            return False
        return not draft_head_facts(knowledge.draft_head, self._spec).acceptance

    def checked(self, knowledge: DraftKnowledge, executor: Executor, prompt: list[int]) -> DraftKnowledge:
        """Check the head with this model and add its acceptance.

        A remark reports the acceptance; a warning reports a head that reads the wrong layers. A head that can't be
        checked, for example for lack of memory, is used unchecked.
        """
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
        with suppress(OSError):  # then it is checked again
            write_record(KeptAcceptance(acceptance), self._file(head))

    def _file(self, head: Path) -> Path:
        """Name the file by the head's files and the model."""
        config, weights = find_file(head, CONFIG_FILE), find_file(head, SINGLE_FILE)
        parts = [json.dumps(asdict(self._spec), default=str, sort_keys=True), self._quantizer]
        parts += [f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in (config, weights) if file is not None]
        return self._folder / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}.json"


def _acceptance(file: Path) -> tuple[float, ...]:
    """Return the kept acceptance, empty if the file is missing or damaged."""
    try:
        return read_record(KeptAcceptance, file).acceptance
    except (OSError, ValueError):
        return ()
