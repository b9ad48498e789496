"""EXAONE 4 (arXiv 2507.11407): norms after attention and FFN; layers that see all positions do not rotate."""

from dataclasses import replace

from hetero_ee.errors import shown
from hetero_ee.models.families import llama
from hetero_ee.models.families.family import FULL, SLIDING, layer_count, read_layer_kinds, sliding_windows
from hetero_ee.models.families.mistral import read_window
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(num_key_value_heads=32, rms_norm_eps=1e-5)
    spec = llama.read_spec(fields.with_values(attention_bias=None, mlp_bias=None), architecture)
    window = read_window(fields)
    kinds = (FULL,) * spec.n_layers if window is None else read_layer_kinds(fields, _pattern(fields))
    ropes = tuple(spec.rope if window is None or kind == SLIDING else None for kind in kinds)
    return replace(
        spec,
        pre_norm=False,
        post_norm=True,
        qk_norm=True,
        sliding_windows=sliding_windows(kinds, window),
        layer_ropes=ropes,
    )


def _pattern(fields: Fields) -> list[str]:
    n_layers, pattern = layer_count(fields), fields.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        kinds = [SLIDING if pattern[layer % len(pattern)] == "L" else FULL for layer in range(n_layers)]
        return [*kinds[:-1], FULL]
    if not isinstance(pattern, int) or pattern < 1:
        raise fields.fail(f"sliding_window_pattern is {shown(pattern)}, expected a number of layers, or L and G.")
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(n_layers)]
