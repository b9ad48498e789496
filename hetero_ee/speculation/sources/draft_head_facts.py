"""What a draft head's config.json says of it, before its weights are read: its shape, its vocabulary, and how good its
drafts were."""

from dataclasses import dataclass
from pathlib import Path

from hetero_ee.errors import ModelError, shown
from hetero_ee.hub.config_file import read_config_file, read_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.statistics import MAX_ACCEPTANCE_POSITIONS
from hetero_ee.speculation.sources.draft_head_file import check_head_shape, draft_token_ids

ACCEPTANCE = "acceptance"  # ours: scripts/measure_draft_head.py prints it


@dataclass(frozen=True, slots=True)
class DraftHeadFacts:
    """spec: of the head's layer. n_draft_tokens: of the vocabulary that it drafts. acceptance: for each position of a
    chain the measured chance that its draft is right where all before it are; empty where nobody measured it."""

    spec: ModelSpec
    n_draft_tokens: int
    acceptance: tuple[float, ...]


def draft_head_facts(folder: Path, model: ModelSpec) -> DraftHeadFacts:
    """Of the head in `folder`. Raises ModelError for one of another model, or whose config.json makes no sense."""
    config = read_config_file(folder)
    spec = read_spec(config)
    check_head_shape(spec, model, folder)
    found = config.get(ACCEPTANCE, [])
    if not isinstance(found, list) or not all(type(chance) in (int, float) and 0 <= chance <= 1 for chance in found):
        raise ModelError(f"{folder}: {ACCEPTANCE} is {shown(found)}; expected a list of chances from 0 to 1.")
    n_tokens = len(draft_token_ids(config, model, folder) or range(model.vocab_size))
    return DraftHeadFacts(spec, n_tokens, tuple(float(chance) for chance in found[:MAX_ACCEPTANCE_POSITIONS]))
