"""Define ModelSpec, the numbers that describe a decoder. `read_spec` creates it from a Hugging Face configuration."""

from dataclasses import dataclass, replace
from typing import Any, Self

from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.decoder import EmbeddingSpec, LayerSpec, LogitsSpec, NormSpec
from hetero_ee.layers.ffn import FfnSpec
from hetero_ee.layers.ops import Activation
from hetero_ee.layers.per_layer import LayerTableSpec
from hetero_ee.layers.rope import RopeSpec
from hetero_ee.layers.sparse_ffn import SparseFfnSpec

CURVE_POINTS = 32  # of ModelSpec.hot_curve


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Numbers that define a decoder-only transformer. Families differ only in these fields."""

    architecture: str  # Hugging Face class name, which identifies the family
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context_tokens: int
    norm: str  # "rms" or "layer"
    norm_eps: float
    norm_affine: bool = True
    norm_bias: bool = True  # for a "layer" norm
    norm_offset: float = 0.0  # constant that a checkpoint leaves out of norms' scales
    pre_norm: bool = True  # before each attention and FFN
    post_norm: bool = False  # after each attention and FFN, before the residual addition
    final_norm: bool = True
    activation: str  # "silu", "gelu", "gelu_tanh", "relu" or "fatrelu"
    activation_threshold: float  # "fatrelu" is 0 below it
    gated: bool  # the FFN is down(act(gate(x)) * up(x)), else down(act(up(x)))
    qkv_bias: bool
    attention_output_bias: bool
    ffn_bias: bool
    qk_norm: bool = False
    qk_norm_whole: bool = False  # over all heads together instead of each head
    attention_scale: float | None = None  # of scores; None means 1 / sqrt(head_dim)
    attention_cap: float = 0.0  # limit of scores, applied by tanh; 0 for none
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attentions and FFNs
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # limit of logits, as attention_cap
    rope: RopeSpec | None = None
    layer_ropes: tuple[RopeSpec | None, ...] | None = None  # per layer, if layers differ from `rope`
    learned_position_offset: int | None = None  # rows skipped in a table of learned positions; None without a table
    sliding_windows: tuple[int | None, ...]  # per layer: positions a token sees, its own included; None means all
    tied_head: bool
    context_is_fixed: bool = False  # the model has no positions beyond max_context_tokens
    neuron_major: bool = False  # FFN weights are stored neuron by neuron, so that inactive ones need not be read
    active_shares: tuple[float, float] = (1.0, 1.0)  # expected shares of neurons needed: decoded and prompt tokens
    first_in_rows: bool = (
        False  # also stores the gate (or up without a gate) by neurons, so that a predictor skips rows
    )
    predictor_rank: int = 0  # of the predictor that selects neurons before the gate; 0 for none
    hot_curve: tuple[float, ...] = ()  # share of needed neurons that are among the first 1/n, 2/n, ... of all
    independent_tokens: tuple[float, ...] = ()  # that choose as many experts as 1, 2, ... adjacent ones; () if unknown
    predicted_share: float = 1.0  # expected share of neurons that the predictor selects for decoded tokens
    matrix_layouts: tuple[tuple[str, str], ...] = ()  # names and layouts of layers' matrices that are not plain int4
    layer_table: LayerTableSpec | None = None  # of per-layer embeddings, if layers have them
    own_layers: tuple[LayerSpec | None, ...] = ()  # layers defined separately; None for those the fields above define
    n_unused_layers: int = 0  # layers after the last one that checkpoints may hold, which predict further tokens
    mtp: LayerSpec | None = None  # the layer that drafts further tokens, if the checkpoint has one, see draft_head.py
    activation_terms: int = 1  # int8 terms into which products split each activation, 1 or 2

    @property
    def in_plain_int4(self) -> Self:
        """Copy of the spec with all of the layers' matrices in 4 bits, without zero points."""
        return replace(self, matrix_layouts=())

    def rope_of(self, layer: int) -> RopeSpec | None:
        return self.rope if self.layer_ropes is None else self.layer_ropes[layer]

    def layer(self, layer: int) -> LayerSpec:
        if self.own_layers and (own := self.own_layers[layer]) is not None:
            return own
        attention = AttentionSpec(
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            window=self.sliding_windows[layer],
            rope=self.rope_of(layer),
            scale=self.attention_scale,
            cap=self.attention_cap,
            qkv_bias=self.qkv_bias,
            output_bias=self.attention_output_bias,
            qk_norm=self.qk_norm,
            qk_norm_whole=self.qk_norm_whole,
            norm_eps=self.norm_eps,
        )
        activation = Activation(self.activation, self.activation_threshold, self.gated)
        ffn = FfnSpec(size=self.ffn_size, activation=activation, bias=self.ffn_bias)
        if self.neuron_major:
            ffn = SparseFfnSpec(
                size=self.ffn_size,
                activation=activation,
                bias=self.ffn_bias,
                first_in_rows=self.first_in_rows,
                predictor_rank=self.predictor_rank,
            )
        return LayerSpec(attention, ffn)

    def changed_layers(self, **changes: Any) -> tuple[LayerSpec, ...]:
        """Return this model's layers with other fields of their attentions."""
        layers = map(self.layer, range(self.n_layers))
        return tuple(
            replace(each, mixer=replace(each.mixer, **changes)) if isinstance(each.mixer, AttentionSpec) else each
            for each in layers
        )

    def plain_layers(self, n_layers: int) -> Self:
        """Return a copy to measure: n_layers equal layers without windows and second terms, which plans count."""
        plain = replace(self, n_layers=n_layers, sliding_windows=(None,) * n_layers, layer_ropes=None, own_layers=())
        return replace(plain, activation_terms=1)

    @property
    def embedding(self) -> EmbeddingSpec:
        return EmbeddingSpec(self.hidden_size, self.learned_position_offset or 0, self.embedding_scale)

    @property
    def logits(self) -> LogitsSpec:
        """Scale and cap that turn the head's product into logits."""
        return LogitsSpec(self.logit_scale, self.logit_cap)

    @property
    def norms(self) -> NormSpec:
        return NormSpec(self.norm, self.norm_eps)

    @property
    def attentions(self) -> list[AttentionSpec]:
        mixers = [self.layer(layer).mixer for layer in range(self.n_layers)]
        return [each for each in mixers if isinstance(each, AttentionSpec)]

    @property
    def ropes(self) -> set[RopeSpec]:
        return {each.rope for each in self.attentions if each.rope is not None}

    @property
    def query_growths(self) -> set[tuple[float, int]]:
        """The different growths of queries with their position, see AttentionSpec."""
        return {each.query_growth for each in self.attentions if each.query_growth is not None}

    @property
    def query_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim
