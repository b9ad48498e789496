"""Reads Hugging Face configurations: which family a model is of, and in which bits its weights were saved."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.models.families import FAMILIES
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

FOUR_BIT_TYPES = ("nf4", "fp4")
# Of config.json as this engine writes it for other formats: which of the layers' matrices are how.
INT8_FIELD, ZEROS_FIELD = "hetero_ee_int8_matrices", "hetero_ee_zero_point_matrices"
ADVICE = "give the original weights, or a copy that bitsandbytes saved in 4 bits"


def spec_from_hf(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The numbers of a Hugging Face configuration; `where` names it in errors.

    Raises ModelError naming the field, or the architecture and what is supported.
    """
    fields = Fields(config, where)
    four_bit_type_from_hf(config, where)  # refuses weights that can't be read
    architectures = fields.get("architectures", [])
    architecture = architectures[0] if isinstance(architectures, list | tuple) and architectures else None
    model_type = fields.text("model_type", "")
    if architecture is None:
        architecture = next((name for name, family in FAMILIES.items() if family.model_type == model_type), None)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        name = architecture or model_type or "none named"
        raise fields.fail(f"architecture {shown(name)} is not supported; supported are {', '.join(FAMILIES)}.")
    spec = FAMILIES[architecture].read_spec(fields, architecture)
    return replace(spec, int8_matrices=_names(fields, INT8_FIELD), zero_point_matrices=_names(fields, ZEROS_FIELD))


def _names(fields: Fields, field: str) -> tuple[str, ...]:
    """A list of names, empty where the field is missing."""
    names = fields.get(field, [])
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise fields.fail(f"{field} is {shown(names)}, expected a list of names.")
    return tuple(sorted(set(names)))


def four_bit_type_from_hf(config: Mapping[str, Any], where: str) -> str | None:
    """Which 4 bits: "nf4" or "fp4" where bitsandbytes saved the weights in 4 bits, None where they are floats.

    Raises ModelError for weights quantized in any other way.
    """
    fields = Fields(config, where)
    if fields.get("quantization_config") is None:
        return None
    section = fields.section("quantization_config")
    in_4_bits, in_8_bits = section.flag("load_in_4bit", False), section.flag("load_in_8bit", False)
    method = section.text("quant_method", "bitsandbytes" if in_4_bits or in_8_bits else "unknown")
    if method != "bitsandbytes":
        raise section.fail(f"quantization by {shown(method)} is not supported; {ADVICE}.")
    if in_8_bits or not in_4_bits:
        found = "load_in_8bit" if in_8_bits else "neither load_in_4bit nor load_in_8bit"
        raise section.fail(f"bitsandbytes with {found} is not supported; {ADVICE}.")
    kind = section.text("bnb_4bit_quant_type", "fp4")  # bitsandbytes' own default
    if kind not in FOUR_BIT_TYPES:
        raise section.fail(f"bnb_4bit_quant_type is {shown(kind)}, expected {' or '.join(FOUR_BIT_TYPES)}.")
    return kind
