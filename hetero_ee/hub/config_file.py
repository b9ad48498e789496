"""Read config.json of a model folder, which is untrusted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_ee.errors import ModelError
from hetero_ee.hub.json_text import depth_exceeds, not_json, parse_json
from hetero_ee.hub.model_files import CONFIG_FILE, QUANTIZE_FILE
from hetero_ee.hub.regular_file import find_file, read_file
from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.models.saved_format import GPTQ, SavedFormat, saved_format_from_hf
from hetero_ee.models.spec import ModelSpec

MAX_CONFIG_BYTES = 10 * 2**20  # published ones have a few KB
MAX_CONFIG_VALUES = 10**6
MAX_CONFIG_DEPTH = 64  # published ones have four levels
ADAPTER_FILE = "adapter_config.json"


def read_spec(config: Any) -> ModelSpec:
    """Return the spec of a model: its architecture and sizes.

    Args:
        config: a dict, a transformers configuration, or the path of config.json or its folder.

    Raises:
        ModelError: names the field, or the unsupported architecture and those supported.
    """
    if isinstance(config, str | Path):
        return spec_from_hf(read_config_file(Path(config)), str(config))
    if isinstance(config, Mapping):
        return spec_from_hf(config, CONFIG_FILE)
    if hasattr(config, "to_dict"):
        return spec_from_hf(config.to_dict(), type(config).__name__)
    raise ModelError(f"expected a configuration, a dict or a path, got {type(config).__name__}.")


def read_saved_format(folder: Path) -> SavedFormat | None:
    """Return the quantization format of a model folder's checkpoint; None for floats. Raises ModelError."""
    return saved_format_from_hf(read_config_file(folder), str(folder))


def read_config_file(path: Path) -> dict[str, Any]:
    """Parse the config.json at `path` (the file or its folder), and old GPTQ models' separate quantization file.

    Raises:
        ModelError: if config.json is missing, too large, or not a JSON object.
    """
    folder, name = (path, CONFIG_FILE) if path.is_dir() else (path.parent, path.name)
    file = find_file(folder, name)
    if file is None:
        raise ModelError(f"{folder / name} is missing; {_instead_of_config(folder)}")
    values = _object_in(file)
    gptq_file = find_file(folder, QUANTIZE_FILE)
    if gptq_file is not None and values.get("quantization_config") is None:
        values["quantization_config"] = {"quant_method": GPTQ} | _object_in(gptq_file)
    return values


def _object_in(file: Path) -> dict[str, Any]:
    data = read_file(file, MAX_CONFIG_BYTES, "a configuration")
    try:
        values = parse_json(data, MAX_CONFIG_VALUES)
    except ValueError as error:
        raise ModelError(f"{file} {not_json(data, error)}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds a {type(values).__name__}, expected a JSON object.")
    if depth_exceeds(values, MAX_CONFIG_DEPTH):
        raise ModelError(f"{file} is nested too deeply, expected at most {MAX_CONFIG_DEPTH} levels.")
    return values


def _instead_of_config(folder: Path) -> str:
    if (folder / ADAPTER_FILE).exists():
        return f"{ADAPTER_FILE} says that this is an adapter: merge it into its base model and give the result."
    if any(folder.glob("*.gguf")):
        return "to use a GGUF file in there, give that file."
    return "a model folder holds config.json, *.safetensors and tokenizer files."
