"""Find a model's draft head: in a folder, or as the MTP layer among the model's own weights."""

from pathlib import Path

from hetero_ee.models.draft_head import MTP, mtp_names, mtp_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import MTP_HEAD
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts, draft_head_facts, read_draft_head
from hetero_ee.speculation.sources.draft_head_layer import DraftHead
from hetero_ee.weights.model_weights import ModelWeights

HeadName = Path | str  # a folder, or MTP_HEAD
# Chance that an MTP layer's draft is right if those before it are, until it was checked: Qwen3.5-0.8B got 2.738 tokens
# per step with three drafts (ModelTC/LightLLM pull request 1402).
MTP_ACCEPTANCE = (0.75,)


def head_title(head: HeadName) -> str:
    """Return what reports call the head."""
    return "the model's MTP layer" if head == MTP_HEAD else f"the draft head in {Path(head).name}"


def head_facts(head: HeadName, model: ModelSpec) -> DraftHeadFacts:
    """Return the facts of a head. Raises: ModelError, CheckpointError: see draft_head_facts."""
    if head == MTP_HEAD:
        return DraftHeadFacts(mtp_spec(model), model.vocab_size, False, (), MTP)
    return draft_head_facts(Path(head), model)


def read_head(head: HeadName, target: Executor) -> DraftHead:
    """Return a head for the target model. The MTP layer's weights are shared with the target, not copied.

    Raises: ModelError, CheckpointError: see read_draft_head.
    """
    if head != MTP_HEAD:
        return read_draft_head(Path(head), target.spec)
    matrices, vectors = target.weights.matrices, target.weights.vectors
    found = ModelWeights({}, {}, target.weights.quantizer)
    for mine, name in mtp_names(target.spec).items():
        if name in matrices:
            found.matrices[mine] = matrices[name]
        else:
            found.vectors[mine] = vectors[name]
    return DraftHead(mtp_spec(target.spec), found, dialect=MTP)
