"""Read Hugging Face configurations: a model's family, its spec, and which matrices need 8 bits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.layers.tensors import MATRIX_LAYOUTS, TensorRole
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.families import FAMILIES
from hetero_ee.models.fields import Fields
from hetero_ee.models.saved_format import MXFP4, SavedFormat, saved_format_from_hf
from hetero_ee.models.spec import ModelSpec

SUFFIX = "ForCausalLM"
# Field that this engine adds to config.json when it translates other formats: layouts of matrices that are not int4.
LAYOUTS_FIELD = "hetero_ee_matrix_layouts"
DOWN, EXPERTS = ".ffn.down", ".moe."


def spec_from_hf(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Return the spec of a Hugging Face configuration; `where` names the configuration in errors.

    Raises:
        ModelError: names the field, or the unsupported architecture and those supported.
    """
    fields = Fields(config, where)
    saved = saved_format_from_hf(config, where)  # refuses unreadable weights
    architectures = fields.get("architectures", [])
    architecture = architectures[0] if isinstance(architectures, list | tuple) and architectures else None
    model_type = fields.text("model_type", "")
    if architecture is None:
        architecture = next((name for name, family in FAMILIES.items() if family.model_type == model_type), None)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        name = architecture or model_type or "none named"
        if fields.get("text_config") is not None:
            able = ", ".join(name for name, family in FAMILIES.items() if family.text_types)
            raise fields.fail(
                f"architecture {shown(name)} is a multimodal model that is not supported; supported are {able}."
            )
        raise fields.fail(f"architecture {shown(name)} is not supported; supported are {_supported()}.")
    if text_types := FAMILIES[architecture].text_types:
        fields = _text_fields(fields, architecture, text_types)
    spec = FAMILIES[architecture].read_spec(fields, architecture)
    layouts = _by_format(spec, saved) if saved else _layouts(fields)
    return replace(spec, matrix_layouts=tuple(sorted(layouts.items())))


def _layouts(fields: Fields) -> dict[str, str]:
    """Return the layouts that config.json gives for matrices, by their names; empty if the field is missing."""
    found = fields.get(LAYOUTS_FIELD, {})
    if not isinstance(found, dict) or not all(each in MATRIX_LAYOUTS.values() for each in found.values()):
        raise fields.fail(f"{LAYOUTS_FIELD} is {shown(found)}, expected layouts by the names of matrices.")
    return found


def _text_fields(fields: Fields, architecture: str, text_types: tuple[str, ...]) -> Fields:
    """Return the fields of a multimodal model's text part. Older files of some models have no separate part."""
    if fields.get("text_config") is None:
        return fields
    text = fields.section("text_config")
    if (found := text.text("model_type", text_types[0])) not in text_types:
        raise fields.fail(
            f"{architecture} with a text part of {shown(found)} is not supported, with {' or '.join(text_types)} it is."
        )
    is_tied = text.get("tie_word_embeddings", fields.get("tie_word_embeddings"))
    return text.with_values(tie_word_embeddings=is_tied)


def _supported() -> str:
    """List the families' class names without their common ending, each name's variants in brackets after it."""
    names = sorted(name.removesuffix(SUFFIX) for name in FAMILIES if name.endswith(SUFFIX))
    stems = [name for name in names if not any(name != stem and name.startswith(stem) for stem in names)]
    variants = {stem: [name[len(stem) :] for name in names if name != stem and name.startswith(stem)] for stem in stems}
    listed = (f"{stem}({'|'.join(found)})" if found else stem for stem, found in variants.items())
    return f"{', '.join(listed)} (each with {SUFFIX})"


def _by_format(spec: ModelSpec, saved: SavedFormat) -> dict[str, str]:
    """Return the layouts of layers' matrices that need 8 bits, or 4 bits with zero points.

    Interleaved groups fit 4 bits only in down, whose input, the neurons, can be reordered. gpt-oss's few matrices
    besides the experts are in 16 bits.
    """
    tensors = all_tensors(decoder_blocks(spec))
    names = [tensor.name for tensor in tensors if tensor.role is TensorRole.MATRIX]
    if saved.is_wide:
        return dict.fromkeys(names, TensorRole.MATRIX_8.value)
    if saved.method == MXFP4:
        return dict.fromkeys((name for name in names if EXPERTS not in name), TensorRole.MATRIX_8.value)
    layouts = {} if saved.symmetric else dict.fromkeys(names, TensorRole.MATRIX_ZEROS.value)
    in_8_bits = (name for name in names if saved.reordered and not name.endswith(DOWN))
    return layouts | dict.fromkeys(in_8_bits, TensorRole.MATRIX_8.value)
