"""OLMo 2 (arXiv 2501.00656) and OLMo 3 (arXiv 2512.13961): Llama with norms after attention and FFN."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.families.family import FULL, SLIDING, layer_count, read_layer_kinds, sliding_windows
from hetero_ee.models.families.mistral import read_window
from hetero_ee.models.families.qwen import TENSOR_NAMES_3
from hetero_ee.models.families.rope_fields import of_layer_kind
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES = TENSOR_NAMES_3 | {
    "layers.{n}.attention.post_norm": ("model.layers.{n}.post_attention_layernorm",),
    "layers.{n}.ffn.post_norm": ("model.layers.{n}.post_feedforward_layernorm",),
}
DEFAULT_THETA = 500000.0  # for OLMo 3


def read_spec_2(fields: Fields, architecture: str) -> ModelSpec:
    spec = llama.read_spec(fields.with_defaults(rms_norm_eps=1e-5), architecture)
    return replace(spec, ffn_bias=False, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_whole=True)


def read_spec_3(fields: Fields, architecture: str) -> ModelSpec:
    """Read OLMo 3, of which every fourth layer sees all positions; only those layers' rotary angles are scaled."""
    kinds = read_layer_kinds(fields, [FULL if layer % 4 == 3 else SLIDING for layer in range(layer_count(fields))])
    theta = fields.number("rope_theta", DEFAULT_THETA)
    full, near = (read_spec_2(of_layer_kind(fields, kind, theta), architecture) for kind in (FULL, SLIDING))
    windows = sliding_windows(kinds, read_window(fields))
    ropes = tuple(full.rope if kind == FULL else near.rope for kind in kinds)
    return replace(full, sliding_windows=windows, layer_ropes=ropes)
