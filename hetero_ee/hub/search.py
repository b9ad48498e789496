"""Search the Hugging Face Hub for models that this engine can run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_ee.errors import UsageError
from hetero_ee.hub.errors import hub_error
from hetero_ee.hub.model_id import ModelId
from hetero_ee.hub.resolve import silenced
from hetero_ee.models.families import FAMILIES
from hetero_ee.models.saved_format import BITSANDBYTES, METHODS

TAGS = ("text-generation", "safetensors")
N_ASKED_PER_SHOWN = 5  # most listed models have unsupported architectures or quantizations
EVERYTHING = ModelId("models")  # the model named by errors of a search


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model in the Hub's list of search results."""

    name: str
    architecture: str
    n_parameters: int | None  # None if unknown
    n_downloads: int  # in the last month
    is_gated: bool


def search_models(words: str, n_models: int, *, offline: bool = False) -> list[FoundModel]:
    """Return up to n_models models that match `words`, the most downloaded first. Raises UsageError or ModelError."""
    from huggingface_hub import HfApi, is_offline_mode

    if offline or is_offline_mode():
        raise UsageError("a search needs the Hugging Face Hub, but this is offline; drop --offline and HF_HUB_OFFLINE.")
    try:
        with silenced():
            listed = HfApi().list_models(
                search=words,
                filter=TAGS,
                sort="downloads",
                limit=n_models * N_ASKED_PER_SHOWN,
                expand=["config", "safetensors", "downloads", "gated"],
            )
            return [found for found in map(_found, listed) if found is not None][:n_models]
    except Exception as error:
        raise hub_error(error, EVERYTHING) from error


def _found(listed: Any) -> FoundModel | None:
    """Convert huggingface_hub's ModelInfo; None for an unsupported model. Raises TypeError for unexpected values."""
    config = listed.config or {}
    if not isinstance(config, Mapping):
        raise TypeError("config")
    architecture = next(iter(config.get("architectures") or ()), None)
    quantized = config.get("quantization_config") or {}
    if architecture not in FAMILIES or quantized.get("quant_method", BITSANDBYTES) not in METHODS:
        return None
    n_parameters = listed.safetensors.total if listed.safetensors else None
    return FoundModel(listed.id, architecture, n_parameters, listed.downloads or 0, bool(listed.gated))
