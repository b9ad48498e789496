"""Describe a model family, and provide functions that several families' readers share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetero_ee.errors import shown
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

MAX_LAYERS = 1000
MAX_KERNEL, MAX_KEY_DIM = 16, 256  # of the CPU's kernel for recurrent layers
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
TANH_GELU = "gelu_pytorch_tanh"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    TANH_GELU: "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "fatrelu": "fatrelu",
}

# Suffix of keys of Family.tensor_names whose modules replace the plain ones in files that split them.
SPLIT = ", split"


@dataclass(frozen=True, slots=True)
class Family:
    """A model architecture: how to read its config.json, and the names of the tensors in its checkpoints."""

    model_type: str  # identifies the architecture if config.json has no `architectures`
    read_spec: Callable[[Fields, str], ModelSpec]  # from config.json's fields and the architecture's name
    # Our name of a tensor (`{n}` for the layer, no ".weight" or ".bias") -> the modules whose rows are stacked in it.
    tensor_names: Mapping[str, tuple[str, ...]]
    text_types: tuple[str, ...] = ()  # known model_types of a multimodal model's text_config; only that part is read
    pairs_experts: bool = False  # tensors of all experts are stored (in, out), with a gate's row before its up's row
    decoder_prefix: str = "model."  # of all tensors except the head's; omitted in checkpoints of a bare decoder

    @property
    def head_name(self) -> str:
        """Name of the head's tensor. Checkpoints of models with a tied head may contain it, too."""
        [module] = self.tensor_names["head.tokens"]
        return module + ".weight"


def recurrent_names(mixer: str, prefix: str, **own: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return tensor names of gated delta layers or Mamba-2: the usual modules after `prefix`, and the family's own."""
    usual = {"conv": "conv1d", "a_log": "A_log", "dt": "dt_bias", "gated_norm": "norm", "output": "out_proj"}
    modules = {name: (module,) for name, module in usual.items()} | own
    return {f"layers.{{n}}.{mixer}.{name}": tuple(prefix + each for each in modules[name]) for name in modules}


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", largest=MAX_LAYERS)


def even_head_dim(fields: Fields) -> int:
    """Return the head size of heads that share the hidden size evenly. Raises ModelError if they can't."""
    hidden_size, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % n_heads:
        raise fields.fail(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {n_heads}.")
    return hidden_size // n_heads


def read_layer_kinds(
    fields: Fields, default: Sequence[str], known: tuple[str, str] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """Return one of the known kinds for each layer, from layer_types or else `default`."""
    kinds, n_layers = fields.get("layer_types", list(default)), layer_count(fields)
    if not isinstance(kinds, list | tuple) or len(kinds) != n_layers:
        raise fields.fail(f"layer_types is {shown(kinds)}, expected one entry for each of {n_layers} layers.")
    for kind in kinds:
        if kind not in known:
            raise fields.fail(f"layer_types names {shown(kind)}, expected {' or '.join(known)}.")
    return tuple(kinds)


def sliding_windows(kinds: Iterable[str], window: int | None) -> tuple[int | None, ...]:
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_window(fields: Fields) -> int | None:
    """Return the sliding window. Null means none; a missing field means 4096, as in Mistral's first release."""
    return None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)


def activation(fields: Fields, field: str, default: str) -> tuple[str, float]:
    """Return this engine's name of the activation in `field`, and its threshold (0 if it has none)."""
    name = fields.text(field, default)
    if name not in ACTIVATIONS:
        raise fields.fail(f"{field} is {shown(name)}, which is not supported; supported are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name], fields.number("hidden_act_param") if name == "fatrelu" else 0.0
