"""Map this engine's tensor names to tensors of Hugging Face checkpoints, whose rows are stacked."""

from dataclasses import dataclass

from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.tensors import TensorSpec
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.families import FAMILIES
from hetero_ee.models.spec import ModelSpec

# Buffers in old checkpoints; the engine computes them from the configuration.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

# Prefixes of tensors in multimodal models: those of the text part, in older and newer files, and of other parts.
_TEXT_PARTS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.")


def text_part_name(name: str) -> str | None:
    """Return a tensor's name in the text part of a multimodal model; None if it belongs to another part."""
    if name.removeprefix("model.").startswith(_OTHER_PARTS):
        return None
    for prefix, plain in _TEXT_PARTS.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


@dataclass(frozen=True, slots=True)
class Part:
    """A whole tensor of the checkpoint and its expected shape."""

    hf_name: str
    shape: tuple[int, ...]
    added: float = 0.0  # constant to add to each value of the checkpoint
    neighbours: tuple[int, int] | None = None  # rows of a head, and how many of them rotate in adjacent pairs


def checkpoint_parts(spec: ModelSpec) -> dict[str, list[Part]]:
    """Map every tensor of the model to the checkpoint's tensors that are stacked in it. Source: transformers."""
    blocks = decoder_blocks(spec)
    return {tensor.name: _parts(spec, block, tensor) for block in blocks for tensor in block.tensors.values()}


def _parts(spec: ModelSpec, block: Block, tensor: TensorSpec) -> list[Part]:
    suffix = ".bias" if tensor.name.endswith("_bias") else "" if tensor.name.endswith(".layer_scale") else ".weight"
    room, _, rest = tensor.name.removesuffix("_bias").partition(".")
    layer, _, short = rest.partition(".")
    pattern = f"layers.{{n}}.{short}" if room == "layers" else f"{room}.{rest}"
    modules, mixer = FAMILIES[spec.architecture].tensor_names[pattern], block.mixer
    sizes, neighbours = [tensor.shape[0] // len(modules)] * len(modules), None
    if isinstance(mixer, AttentionSpec) and len(modules) == 3:
        sizes, rope = [mixer.query_size, mixer.kv_size, mixer.kv_size], spec.rope
        n_parts = 1 if mixer.kv_layer is not None else 2 if mixer.keys_are_values else 3
        modules, sizes = modules[:n_parts], sizes[:n_parts]
        neighbours = (mixer.head_dim, rope.n_features) if rope is not None and rope.interleaved else None
    added = spec.norm_offset if tensor.name.endswith("norm") else 0.0
    return [
        Part(module.format(n=layer) + suffix, (rows, *tensor.shape[1:]), added, None if number == 2 else neighbours)
        for number, (module, rows) in enumerate(zip(modules, sizes, strict=True))
    ]


def engine_order(part: Part) -> list[int] | None:
    """Return the indices that put a part's rows into this engine's order; None if they already are.

    In this engine, features that rotate together are half of a head's rotating features apart.
    """
    if part.neighbours is None:
        return None
    head, turned = part.neighbours
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, head)]
    return [first + row for first in range(0, part.shape[0], head) for row in order]
