"""List the shapes of well-known models, to plan for them and time them without their weights.

The file holds the fields of the models' published config.json that affect shapes and times. It also holds their numbers
of parameters, against which a test checks the shapes.
"""

import json
import re
from pathlib import Path
from typing import Any

from hetero_ee.errors import UsageError, shown
from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.models.spec import ModelSpec

SHAPES_FILE = Path(__file__).parents[1] / "assets" / "shapes.json"
PARAMETERS = "parameters"  # the one field that config.json lacks


def known_shapes() -> dict[str, dict[str, Any]]:
    """Return the fields of every well-known model's configuration, by the model's name."""
    found: dict[str, dict[str, Any]] = json.loads(SHAPES_FILE.read_text(encoding="utf-8"))
    return found


def similar_names(name: str) -> list[str]:
    """Return the well-known models whose names begin like `name`, written as in other programs, such as gpt-oss:20b.

    If none do, all of them.
    """
    beginning, shapes = _squeezed(name), known_shapes()
    return [known for known in shapes if _squeezed(known).startswith(beginning)] or list(shapes)


def _squeezed(name: str) -> str:
    return re.sub("[-_: ]", "", name.lower())


def known_spec(name: str) -> ModelSpec:
    """Return the spec of a well-known model. Raises UsageError for an unknown name."""
    shapes = known_shapes()
    if name not in shapes:
        raise UsageError(f"{shown(name)} is not a model with known shapes; choose one of {', '.join(shapes)}.")
    return spec_from_hf({field: value for field, value in shapes[name].items() if field != PARAMETERS}, name)
