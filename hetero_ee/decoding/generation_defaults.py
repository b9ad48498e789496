"""What a model's files say of how to generate with it: sampling and the tokens that end a text."""

from pathlib import Path
from typing import Any

from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.errors import ModelError, UsageError
from hetero_ee.hub.config_file import read_config_file
from hetero_ee.hub.regular_file import find_file
from hetero_ee.text.tokenizer import Tokenizer


def generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, empty where there is none. Raises ModelError."""
    file = find_file(folder, "generation_config.json")
    return read_config_file(file) if file else {}


def default_sampling(hf_generation: dict[str, Any], folder: Path) -> SamplingParams:
    """As it says. Raises ModelError for values that make no sense."""
    try:
        return SamplingParams.from_hf(hf_generation)
    except UsageError as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from error


def eos_token_ids(hf_generation: dict[str, Any], folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The first that names any: generation_config.json, config.json, the tokenizer."""
    for named in (
        hf_generation.get("eos_token_id"),
        read_config_file(folder).get("eos_token_id"),
        tokenizer.eos_token_id,
    ):
        ids = named if isinstance(named, list) else [named]
        if any(isinstance(token_id, int) for token_id in ids):
            return frozenset(token_id for token_id in ids if isinstance(token_id, int))
    return frozenset()
