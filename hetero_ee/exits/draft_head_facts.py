"""What a draft head's config.json says of it, before its weights are read: its shape, and how good its drafts were."""

from dataclasses import dataclass
from pathlib import Path

from hetero_ee.errors import ModelError, shown
from hetero_ee.exits.draft_head_file import check_head_shape
from hetero_ee.models.hf_config import read_config_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.statistics import MAX_ACCEPTANCE_POSITIONS

ACCEPTANCE = "acceptance"  # ours: scripts/measure_draft_head.py prints it


@dataclass(frozen=True, slots=True)
class DraftHeadFacts:
    """spec: of the head's layer. acceptance: for each position of a chain the measured chance that its draft is right
    where all before it are; empty where nobody measured it."""

    spec: ModelSpec
    acceptance: tuple[float, ...]


def draft_head_facts(folder: Path, model: ModelSpec) -> DraftHeadFacts:
    """Of the head in `folder`. Raises ModelError for one of another model, or whose config.json makes no sense."""
    config = read_config_file(folder)
    spec = ModelSpec.from_hf(config)
    check_head_shape(spec, model, folder)
    found = config.get(ACCEPTANCE, [])
    if not isinstance(found, list) or not all(type(chance) in (int, float) and 0 <= chance <= 1 for chance in found):
        raise ModelError(f"{folder}: {ACCEPTANCE} is {shown(found)}; expected a list of chances from 0 to 1.")
    return DraftHeadFacts(spec, tuple(float(chance) for chance in found[:MAX_ACCEPTANCE_POSITIONS]))
