"""Synthetic drafts with a given acceptance at the cost of a real draft head, for benchmarks.

A head's training and the text decide which drafts are right, but not what they cost. So a head with any weights
computes every draft. Its result is then replaced: by the sequence's next token as often as the rates say, else by
another token. Everything else, including verification, is computed and timed as usual.
"""

import json
import math
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from hetero_ee.errors import ModelError, UsageError
from hetero_ee.hub.config_file import read_config_file, read_spec
from hetero_ee.hub.model_files import CONFIG_FILE, SINGLE_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.statistics import DraftRates
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.sources.draft_head_file import ACCEPTANCE, head_shapes
from hetero_ee.speculation.sources.source import Choose, Draft, DraftSource

SEED = 0
RANDOM_VALUES = 2**20 - 3  # numbers of a random head, repeated; odd, so that rows differ


def write_synthetic_head(folder: Path, model: ModelSpec, rates: DraftRates, own: Path | None) -> None:
    """Write a draft head with these rates for this model: a copy of `own`, or an EAGLE-1 head with random weights.

    Random heads need about two bytes per weight on disk, 0.5 GB for a 7B model.

    Raises: ModelError: if `own` can't be read.
    """
    if own is None:
        config = _config(model)
        save_file(_random_tensors(config), folder / SINGLE_FILE)
    else:
        config, file = dict(read_config_file(own)), find_file(own, SINGLE_FILE)
        if file is None:
            raise ModelError(f"{own} holds no {SINGLE_FILE}, the draft head's weights.")
        shutil.copyfile(file, folder / SINGLE_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config | {ACCEPTANCE: list(rates.acceptance)}))


def synthetic(drafting: Drafting, text: Sequence[int], rates: DraftRates, vocab_size: int) -> Drafting:
    """Return the drafting with only its draft head, whose drafts are replaced by synthetic ones.

    Args:
        text: All tokens of the sequence, including those that the model is going to generate.

    Raises: UsageError: if the drafting has no draft head.
    """
    heads = [source for source in drafting.sources if not source.is_free]
    if not heads:
        raise UsageError("synthetic acceptance is of a draft head's drafts, and the plan drafts by exits; drop one.")
    sources = tuple(SyntheticSource(head, text, rates, vocab_size) for head in heads)
    return replace(drafting, sources=sources)


class SyntheticSource:
    """A DraftSource that randomly makes the drafts of `inner` right or wrong. Their confidence is the rate."""

    is_free = False

    def __init__(self, inner: DraftSource, text: Sequence[int], rates: DraftRates, vocab_size: int) -> None:
        self._inner, self._text, self._rates, self._vocab_size = inner, text, rates, vocab_size
        self.name, self.draft_s = f"synthetic {inner.name}", inner.draft_s
        self.observe, self.read_prompt = inner.observe, inner.read_prompt
        self.truncate, self.close = inner.truncate, inner.close

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """See DraftSource.drafts. Drafts end where the known text ends."""
        with closing(self._inner.drafts(sequence, token_ids, choose)) as computed:
            for place, position in enumerate(range(len(token_ids), len(self._text))):
                if next(computed, None) is None:
                    return
                chance, true_id = self._rates.acceptance_at(place), self._text[position]
                is_right = np.random.default_rng((SEED, position, place)).random() < chance
                yield Draft(true_id if is_right else (true_id + 1) % self._vocab_size, chance)


def _config(model: ModelSpec) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_context_tokens,
    }


def _random_tensors(config: Mapping[str, object]) -> dict[str, torch.Tensor]:
    spec = read_spec(config)
    values = torch.randn(RANDOM_VALUES, generator=torch.Generator().manual_seed(SEED)) / spec.hidden_size**0.5
    halves = values.half()
    tensors = {}
    for name, shape in head_shapes(spec, {}).items():
        n_values = math.prod(shape)
        repeated = halves.repeat(-(-n_values // RANDOM_VALUES))[:n_values].view(shape).contiguous()
        tensors[name] = repeated if len(shape) == 2 else torch.ones(shape, dtype=torch.float16)
    return tensors
