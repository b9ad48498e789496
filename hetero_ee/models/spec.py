"""ModelSpec: the numbers that define a decoder. `read_spec` is its only door from Hugging Face."""

from dataclasses import dataclass

from hetero_ee.models.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A pre-norm decoder-only transformer, family by family reduced to the same few switches.

    family: row of the weight-name table ("llama", "phi3", "opt"); architecture: the Hugging Face class name.
    norm: "rms" or "layer". activation: "silu", "gelu", "gelu_tanh", "relu" or "fatrelu" (0 below a threshold).
    gated: FFN is down(act(gate(x)) * up(x)), else down(act(up(x))).
    sliding_windows: for each layer the positions a token sees, itself included; None is all of them.
    learned_position_offset: rows skipped in a learned position table; None where positions are rotary.
    """

    architecture: str
    family: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context_tokens: int
    norm: str
    norm_eps: float
    norm_affine: bool
    final_norm: bool
    activation: str
    activation_threshold: float
    gated: bool
    qkv_bias: bool
    attention_output_bias: bool
    ffn_bias: bool
    qk_norm: bool
    rope: RopeSpec | None
    learned_position_offset: int | None
    sliding_windows: tuple[int | None, ...]
    tied_head: bool
    context_is_fixed: bool = False  # beyond max_context_tokens the model has no positions at all

    @property
    def query_size(self) -> int:
        """Features of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key heads (and of all value heads)."""
        return self.n_kv_heads * self.head_dim
