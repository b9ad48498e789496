"""Map this engine's tensor names to tensors of Hugging Face checkpoints, whose rows are stacked."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.latent_attention import KEY_UP, LatentAttentionSpec
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.layers.per_layer import PerLayerSpec
from hetero_ee.layers.rope import halves_of_pairs
from hetero_ee.layers.tensors import TensorSpec
from hetero_ee.models.blocks import Block
from hetero_ee.models.draft_head import stored_blocks
from hetero_ee.models.families import FAMILIES
from hetero_ee.models.families.family import SPLIT
from hetero_ee.models.spec import ModelSpec

# Buffers in old checkpoints; the engine computes them from the configuration.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
IGNORED_PREFIXES = (MTP_PREFIX := "mtp.",)  # layers that predict further tokens
# Qwen's names in the first of them, and those of DeepSeek's layout, which GGUF files follow, in the layer {n}.
_MTP_PARTS = {
    "layers.0.": "",
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "shared_head.norm.",
}

# Prefixes of tensors in multimodal models: those of the text part, in older and newer files, and of other parts.
_TEXT_PARTS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# Parameters of checkpoints that are neither a weight nor a bias of a module.
PARAMETERS = (
    *(".A_log", ".dt_bias", ".layer_scalar", ".sinks", ".expert_bias"),
    *(".router.scale", ".per_expert_scale", ".e_score_correction_bias", ".D"),
)
BLOCKS, BIASES = "_blocks", "_bias"  # ends of the names of all experts' quantized codes, and of their biases
GATED_NORM = "gated_norm"  # a norm whose scale checkpoints store whole, whatever the family's norm_offset
_OTHER_PARTS = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."),
)


def text_part_name(name: str) -> str | None:
    """Return a tensor's name in the text part of a multimodal model; None if it belongs to another part."""
    if name.removeprefix("model.").startswith(_OTHER_PARTS):
        return None
    for prefix, plain in _TEXT_PARTS.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def mtp_part_name(name: str, spec: ModelSpec) -> str:
    """Return the name of an MTP layer's tensor in DeepSeek's layout: in the layer after the last. Others stay."""
    short = name.removeprefix("model.").removeprefix(MTP_PREFIX)
    if spec.mtp is None or not name.removeprefix("model.").startswith(MTP_PREFIX):
        return name
    found = (plain + short.removeprefix(own) for own, plain in _MTP_PARTS.items() if short.startswith(own))
    return next((f"model.layers.{spec.n_layers}.{part}" for part in found), name)


@dataclass(frozen=True, slots=True)
class Part:
    """A whole tensor of the checkpoint and its expected shape."""

    hf_name: str
    shape: tuple[int, ...]
    added: float = 0.0  # constant to add to each value of the checkpoint
    picked: tuple[int, Sequence[int]] | None = None  # of each group of this many rows, those to read, in order
    n_experts: int = 0  # experts or heads that the tensor's first dimension counts; 0 for matrices of one, and others
    is_transposed: bool = False  # an expert's matrix is stored (in, out)
    n_turned: int = 0  # number of equal parts of the picked rows that are transposed; 0 for none
    expert: int | None = None  # index of the expert, if it is a tensor of one

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape as rows: of all experts, and without a convolution's dimension of size 1."""
        if self.n_experts:
            n_rows, *columns = reversed(self.shape[1:]) if self.is_transposed else self.shape[1:]
            return self.n_experts * n_rows, *columns
        return self.shape if len(self.shape) < 3 else (math.prod(self.shape[:-1]), self.shape[-1])

    @property
    def n_rows(self) -> int:
        """Number of rows to read."""
        n_rows = self.stored_shape[0]
        return n_rows if self.picked is None else n_rows // self.picked[0] * len(self.picked[1])


def checkpoint_parts(spec: ModelSpec, present: Container[str] | None = None) -> dict[str, list[Part]]:
    """Map every tensor of the model to the checkpoint's tensors that are stacked in it. Source: transformers.

    Args:
        present: names of the checkpoint's tensors. Experts are one tensor if it is among them, or nothing is known.
    """
    blocks = stored_blocks(spec)
    return {tensor.name: _parts(spec, block, tensor, present) for block in blocks for tensor in block.tensors.values()}


def unused_tensors(spec: ModelSpec) -> set[str]:
    """Return the keys' and values' tensors of layers that read those of other layers, which checkpoints hold anyway."""
    names = FAMILIES[spec.architecture].tensor_names
    mixers = [spec.layer(layer).mixer for layer in range(spec.n_layers)]
    readers = [n for n, each in enumerate(mixers) if isinstance(each, AttentionSpec) and each.kv_layer is not None]
    modules = (*names["layers.{n}.attention.qkv"][1:], *names["layers.{n}.attention.key_norm"]) if readers else ()
    return {
        f"{module.format(n=layer)}.{ending}" for layer in readers for module in modules for ending in ("weight", "bias")
    }


def _parts(spec: ModelSpec, block: Block, tensor: TensorSpec, present: Container[str] | None) -> list[Part]:
    suffix = ".bias" if tensor.name.endswith("_bias") else ".weight"
    room, _, rest = tensor.name.removesuffix("_bias").partition(".")
    layer, _, short = rest.partition(".")
    pattern = f"layers.{{n}}.{short}" if room == "layers" else f"{room}.{rest}"
    names, mixer = FAMILIES[spec.architecture].tensor_names, block.mixer
    modules, split = names[pattern], names.get(pattern + SPLIT, ())
    is_split = bool(split) and present is not None and split[0].format(n=layer) + suffix in present
    modules = split if is_split else modules
    if isinstance(mixer, MoeSpec) and short.rpartition(".")[2] in (mixer.first, "down"):
        own = [name.replace("{n}", layer) for name in modules]
        return _of_experts(own, tensor, mixer, FAMILIES[spec.architecture].pairs_experts, present)
    sizes = () if mixer is None else mixer.row_sizes(short.rpartition(".")[2])
    if len(modules) == 1 or not sizes:
        sizes = (tensor.shape[0] // len(modules),) * len(modules)
    parts = [Part(module, (rows, *tensor.shape[1:])) for module, rows in zip(modules, sizes, strict=False)]
    if isinstance(mixer, AttentionSpec) and pattern.endswith(".qkv") and len(modules) > 1:
        parts = _of_heads(parts, mixer)
    picks = () if mixer is None or is_split or len(set(modules)) > 1 else mixer.picked_rows(short.rpartition(".")[2])
    if picks:
        n_rows = tensor.shape[0] // sum(len(rows) for _, rows in picks) * picks[0][0]
        parts = [Part(modules[0], (n_rows, *tensor.shape[1:]), picked=each) for each in picks]
    if isinstance(mixer, LatentAttentionSpec) and is_split:
        by_head = mixer.n_heads, tensor.shape[0] // mixer.n_heads, tensor.shape[1]
        parts = [Part(modules[0], by_head, n_experts=mixer.n_heads)]
    elif isinstance(mixer, LatentAttentionSpec) and short.endswith(KEY_UP):
        stored = mixer.n_heads * picks[0][0], mixer.kv_rank
        parts = [replace(parts[0], shape=stored, n_turned=mixer.n_heads)]
    if isinstance(mixer, PerLayerSpec) and pattern.endswith(".context"):  # all layers' are one tensor
        table = mixer.table
        mine = range(int(layer) * table.size, (int(layer) + 1) * table.size)
        parts = [Part(modules[0], (table.width, *tensor.shape[1:]), picked=(table.width, mine))]
    if pattern.endswith(".conv") and len(tensor.shape) > 1:  # weights of a convolution by channel
        parts = [replace(part, shape=(part.shape[0], 1, *part.shape[1:])) for part in parts]
    added = spec.norm_offset if tensor.name.endswith("norm") and not tensor.name.endswith(GATED_NORM) else 0.0
    full = [part.hf_name.format(n=layer) + ("" if part.hf_name.endswith(PARAMETERS) else suffix) for part in parts]
    return [replace(part, hf_name=name, added=added) for part, name in zip(parts, full, strict=True)]


def _of_experts(
    modules: Sequence[str], tensor: TensorSpec, moe: MoeSpec, is_paired: bool, present: Container[str] | None
) -> list[Part]:
    """Describe the rows of experts: one tensor of all experts or several tensors of each.

    Args:
        modules: the name of the tensor of all experts, and those of an expert's modules.
        is_paired: see Family.pairs_experts.
        present: see checkpoint_parts.
    """
    (whole, *single), n_experts, is_bias = modules, moe.router.n_experts, len(tensor.shape) == 1
    n_rows, *columns = tensor.shape[0] // n_experts, *tensor.shape[1:]
    ending, whole = (".bias", whole + BIASES) if is_bias else (".weight", whole)
    if not single or present is None or whole in present or whole + BLOCKS in present:
        shape = (*columns, n_rows) if is_paired else (n_rows, *columns)
        is_first = tensor.name.removesuffix("_bias").endswith(moe.first)
        pairs = (n_rows, halves_of_pairs(n_rows)) if is_paired and is_first else None
        return [Part(whole, (n_experts, *shape), picked=pairs, n_experts=n_experts, is_transposed=is_paired)]
    part_shape = n_rows // len(single), *columns
    return [Part(name.format(e=e) + ending, part_shape, expert=e) for e in range(n_experts) for name in single]


def _of_heads(parts: list[Part], attention: AttentionSpec) -> list[Part]:
    """Describe the rows of queries and keys, which may rotate in adjacent pairs, and of gates, which follow a query."""
    rope, head = attention.rope, attention.head_dim
    turned = None
    if rope is not None and rope.interleaved:
        turned = head, [*halves_of_pairs(rope.n_features), *range(rope.n_features, head)]
    found = [replace(part, picked=turned) for part in parts[:2]] + parts[2:]
    if attention.is_gated:
        both = (2 * parts[0].shape[0], *parts[0].shape[1:])
        for place, first in ((0, 0), (3, head)):
            found[place] = replace(found[place], shape=both, picked=(2 * head, range(first, first + head)))
    return found


def engine_order(part: Part) -> list[int] | None:
    """Return the indices of a part's rows in this engine's order; None if the part has them so."""
    if part.picked is None:
        return None
    every, picked = part.picked
    return [first + row for first in range(0, part.stored_shape[0], every) for row in picked]
