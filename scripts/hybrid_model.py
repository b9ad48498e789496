"""The hybrid test models in training: Qwen3.5, with a head that predicts further tokens, and Qwen3.5 with experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from delta_rule import chunked_delta_rule
from story_model import causal_attention, drop, random_bytes
from torch import Tensor, nn

N_AHEAD = 2  # tokens after the next one that the head is trained to predict, each from its own earlier output
IGNORED = -100  # a target that has no loss


class Delta(nn.Module):
    """A gated delta layer, normalized before, with a forward for training."""

    def __init__(self, norm: nn.Module, parts: Any) -> None:
        super().__init__()
        self.norm, self.parts = norm, parts

    def forward(self, x: Tensor, _cos: Tensor, _sin: Tensor) -> Tensor:
        parts, x = self.parts, self.norm(x)
        weight = parts.conv1d.weight[:, 0]
        padded = F.pad(parts.in_proj_qkv(x), (0, 0, weight.shape[1] - 1, 0))
        mixed = F.silu(sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(weight.shape[1])))
        sizes = [parts.key_dim, parts.key_dim, parts.value_dim]
        heads = [y.unflatten(-1, (-1, dim)) for y, dim in zip(mixed.split(sizes, -1), self.head_sizes(), strict=True)]
        query, key, value = (y.transpose(1, 2).float() for y in heads)
        shared = parts.num_v_heads // parts.num_k_heads
        query, key = (
            (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(shared, dim=1)
            for y in (query, key)
        )
        beta = parts.in_proj_b(x).float().sigmoid().transpose(1, 2)
        log_decay = -parts.A_log.exp() * F.softplus(parts.in_proj_a(x).float() + parts.dt_bias)
        query = query * parts.head_k_dim**-0.5
        with torch.autocast("cpu", enabled=False):
            out = chunked_delta_rule(query, key, value, log_decay.transpose(1, 2), beta).transpose(1, 2)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + parts.layer_norm_epsilon)
        gate = F.silu(parts.in_proj_z(x).float()).unflatten(-1, (-1, parts.head_v_dim))
        added: Tensor = parts.out_proj((parts.norm.weight * out * gate).flatten(2))
        return added

    def head_sizes(self) -> tuple[int, int, int]:
        return self.parts.head_k_dim, self.parts.head_k_dim, self.parts.head_v_dim


class Attention(nn.Module):
    """Attention with an output gate, normalized before, with a forward for training."""

    def __init__(self, norm: nn.Module, parts: Any) -> None:
        super().__init__()
        self.norm, self.parts = norm, parts

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts, x = self.parts, self.norm(x)
        query, gate = parts.q_proj(x).unflatten(-1, (-1, 2 * parts.head_dim)).chunk(2, dim=-1)
        key, value = (proj(x).unflatten(-1, (-1, parts.head_dim)) for proj in (parts.k_proj, parts.v_proj))
        query, key = (rotate(norm(y), cos, sin) for norm, y in ((parts.q_norm, query), (parts.k_norm, key)))
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        key, value = (y.repeat_interleave(parts.num_key_value_groups, dim=1) for y in (key, value))
        mixed = causal_attention(query.to(value.dtype), key.to(value.dtype), value).transpose(1, 2)
        added: Tensor = parts.o_proj((mixed * gate.sigmoid()).flatten(2))
        return added


class Dense(nn.Module):
    """A gated FFN, normalized before."""

    def __init__(self, norm: nn.Module, parts: Any) -> None:
        super().__init__()
        self.norm, self.parts = norm, parts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return its output, and a balance loss of 0."""
        return self.parts(self.norm(x)), torch.zeros(())


class Experts(nn.Module):
    """Routed experts and a gated shared one, normalized before: each expert multiplies all of its tokens at once."""

    def __init__(self, norm: nn.Module, parts: Any) -> None:
        super().__init__()
        self.norm, self.parts = norm, parts

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is compiled: the number of tokens of each expert differs in every call."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return their output, and the balance loss: experts x sum of (share of tokens x mean probability)."""
        parts, normed = self.parts, self.norm(x).flatten(0, 1)
        k = parts.gate.top_k
        with torch.autocast("cpu", enabled=False):
            probabilities = F.linear(normed.float(), parts.gate.weight).softmax(-1)
        weights, chosen = probabilities.topk(k, dim=-1)
        counts = torch.bincount(chosen.flatten(), minlength=parts.gate.num_experts)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // k
        gate, up = per_expert(normed[tokens], parts.experts.gate_up_proj, counts).chunk(2, dim=-1)
        out = per_expert(F.silu(gate) * up, parts.experts.down_proj, counts)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()[order]
        routed = torch.zeros(normed.shape, dtype=torch.float32).index_add(0, tokens, out.float() * weights[:, None])
        shared = parts.shared_expert(normed) * parts.shared_expert_gate(normed).sigmoid()
        balance = parts.gate.num_experts * (counts / len(normed) * probabilities.mean(0)).sum()
        return (routed + shared).view(x.shape), balance


def per_expert(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Rows sorted by expert, multiplied by the matrices (experts, out, in) of theirs."""
    if torch.is_autocast_enabled("cpu"):
        x, matrices = x.bfloat16(), matrices.bfloat16()
    return torch.cat([F.linear(*pair) for pair in zip(x.split(counts.tolist()), matrices.unbind(), strict=True)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first values of every head of (batch, length, heads, head size)."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[..., None, :] + torch.cat([-second, first], dim=-1) * sin[..., None, :]
    return torch.cat([turned.to(x.dtype), kept], dim=-1)


class Head(nn.Module):
    """The tensors of a head that predicts further tokens, named as in Qwen3.5's files after `mtp.`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config, layers = model.config, model.model.layers
        layer_type, norm_type = type(layers[0]), type(model.model.norm)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = norm_type(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm_type(config.hidden_size, eps=config.rms_norm_eps)
        attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([layer_type(config, attention)])
        self.norm = norm_type(config.hidden_size, eps=config.rms_norm_eps)


class Layer(nn.Module):
    """A decoder layer in training: a mixer and an FFN or experts, with dropout on what each adds."""

    def __init__(self, layer: Any, rate: float) -> None:
        super().__init__()
        mixer = Delta if layer.block_type == "linear_attention" else Attention
        parts = layer.linear_attn if mixer is Delta else layer.self_attn
        ffn = Experts if hasattr(layer.mlp, "experts") else Dense
        self.mixer: nn.Module = mixer(layer.input_layernorm, parts)
        self.ffn: nn.Module = ffn(layer.post_attention_layernorm, layer.mlp)
        self.rate = rate

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, randoms: Tensor | None) -> tuple[Tensor, Tensor]:
        first, second = (None, None) if randoms is None else randoms.unbind()
        x = x + drop(self.mixer(x, cos, sin), first, self.rate)
        added, balance = self.ffn(x)
        return x + drop(added, second, self.rate), balance


class HybridModel(nn.Module):
    """A Qwen3.5 model of transformers and its head for further tokens, if it has one, with a forward for a CPU."""

    def __init__(self, model: Any, rate: float, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weights = nn.ModuleDict({"model": model})  # what is trained
        self.model = model
        self.layers = nn.ModuleList(Layer(layer, rate) for layer in model.model.layers)
        if model.config.mtp_num_hidden_layers:
            self.mtp = self.weights["mtp"] = Head(model)
            self.mtp_layer = Layer(self.mtp.layers[0], 0.0)
        self.rate = rate
        into_stream = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
        for name, parameter in self.weights.named_parameters():
            if parameter.ndim >= 2 and "conv1d" not in name:
                additions = 2 * len(self.layers) if name.endswith(into_stream) else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(additions))
            elif name.endswith("dt_bias"):  # half-lives from about a token to about a thousand
                step = torch.exp(torch.rand(parameter.shape) * math.log(100)) * 1e-3
                parameter.data.copy_(step + torch.log(-torch.expm1(-step)))

    def compile_parts(self) -> None:
        """Compile all mixers and dense FFNs."""
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.mixer.compile(dynamic=False)
                layer.ffn.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)  # type: ignore[method-assign]

    @property
    def n_ahead(self) -> int:
        """Tokens after the next one that are learned."""
        return N_AHEAD if "mtp" in self.weights else 0

    def rotary(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.model.model.rotary_emb(torch.zeros(()), torch.arange(tokens.shape[1])[None])
        return cos, sin

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The final normed states (batch, length, hidden size), and the mean balance loss of the layers."""
        x = self.model.model.embed_tokens(tokens)
        cos, sin = self.rotary(tokens)
        randoms: list[Tensor | None] = [None] * len(self.layers)
        if self.training and self.rate:
            randoms = list(random_bytes(len(self.layers), 2, *x.shape))
        balance = torch.zeros(())
        for layer, pair in zip(self.layers, randoms, strict=True):
            x, added = layer(x, cos, sin, pair)
            balance = balance + added / len(self.layers)
        return self.model.model.norm(x), balance

    def further(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The head's normed states, from final states and the tokens one ahead of them."""
        embedded = self.mtp.pre_fc_norm_embedding(self.model.model.embed_tokens(tokens))
        x = self.mtp.fc(torch.cat([embedded, self.mtp.pre_fc_norm_hidden(states)], dim=-1))
        x, _ = self.mtp_layer(x.float(), *self.rotary(tokens), None)
        normed: Tensor = self.mtp.norm(x)
        return normed

    def loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of what normed states predict through the (tied) head."""
        logits = F.linear(states, self.model.model.embed_tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def losses(self, tokens: Tensor, targets: Tensor, n_ahead: int) -> tuple[list[Tensor], Tensor]:
        """The losses of the next token and of `n_ahead` further ones, and the balance loss."""
        states, balance = self.states(tokens)
        found = [self.loss(states, targets)]
        known = targets
        for ahead in range(1, n_ahead + 1):
            states = self.further(states, known)
            known = known.roll(-1, dims=1)
            wanted = known.clone()
            wanted[:, -ahead:] = IGNORED
            found.append(self.loss(states, wanted))
        return found, balance
