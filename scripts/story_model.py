"""The demonstration model in training: a Hugging Face Llama with a forward that is fast on a CPU."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb


class TrainingLayer(nn.Module):
    """A Hugging Face decoder layer with a forward for training: dropout, and attention that is fast on a CPU."""

    def __init__(self, layer: LlamaDecoderLayer, rate: float) -> None:
        super().__init__()
        self.layer = layer
        self.rate = rate

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, randoms: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream after the layer, and the mean magnitude of its activated gates."""
        first, second = (None, None) if randoms is None else randoms.unbind()
        x = x + drop(self.attend(self.layer.input_layernorm(x), cos, sin), first, self.rate)
        normed, parts = self.layer.post_attention_layernorm(x), self.layer.mlp
        gate = parts.act_fn(parts.gate_proj(normed))
        added = drop(parts.down_proj(gate * parts.up_proj(normed)), second, self.rate)
        return x + added, gate.abs().mean(dtype=torch.float32)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.layer.self_attn
        shape = (*x.shape[:2], -1, parts.head_dim)
        query, key, value = (proj(x).view(shape).transpose(1, 2) for proj in (parts.q_proj, parts.k_proj, parts.v_proj))
        query, key = (turned.to(value.dtype) for turned in apply_rotary_pos_emb(query, key, cos, sin))
        key, value = (heads.repeat_interleave(parts.num_key_value_groups, dim=1) for heads in (key, value))
        mixed: Tensor = parts.o_proj(causal_attention(query, key, value).transpose(1, 2).reshape(*x.shape[:2], -1))
        return mixed


class StoryModel(nn.Module):
    """The Llama in training, with the state of every layer at hand."""

    def __init__(self, llama: LlamaForCausalLM, rate: float, seed: int) -> None:
        super().__init__()
        self.llama = llama
        self.rate = rate
        self.layers = nn.ModuleList(TrainingLayer(layer, self.rate) for layer in llama.model.layers)
        torch.manual_seed(seed)
        into_stream = ("o_proj.weight", "down_proj.weight")  # these start smaller, by the number of additions
        for name, parameter in llama.named_parameters():
            if parameter.ndim == 2:
                additions = 2 * len(self.layers) if name.endswith(into_stream) else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(additions))

    def states(self, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
        """The residual stream after every layer, and the sum of the layers' mean activated gates."""
        x = self.llama.model.embed_tokens(tokens)
        cos, sin = self.llama.model.rotary_emb(x, torch.arange(tokens.shape[1])[None])
        randoms: list[Tensor | None] = [None] * len(self.layers)
        if self.training and self.rate:
            drawn = random_bytes(1 + 2 * len(self.layers), *x.shape)
            x = drop(x, drawn[0], self.rate)
            randoms = list(torch.unflatten(drawn[1:], 0, (-1, 2)))
        found, activity = [], torch.zeros(())
        for layer, pair in zip(self.layers, randoms, strict=True):
            x, active = layer(x, cos, sin, pair)
            found.append(x)
            activity = activity + active
        return found, activity

    def logits(self, state: Tensor) -> Tensor:
        """A layer's state read through the final norm and the (tied) head."""
        return F.linear(self.llama.model.norm(state), self.llama.model.embed_tokens.weight)

    def loss(self, state: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of what a layer's state predicts."""
        return F.cross_entropy(self.logits(state).float().flatten(0, 1), targets.flatten())


def causal_attention(query: Tensor, key: Tensor, value: Tensor, parts: int = 4) -> Tensor:
    """Causal attention, a part of the queries at a time (on a CPU twice as fast as the fused kernel in training)."""
    length = query.shape[2]
    size = -(-length // parts)
    mask = torch.full((length, length), -math.inf, dtype=query.dtype).triu(1)
    mixed = []
    for start in range(0, length, size):
        end = min(start + size, length)
        scores = query[:, :, start:end] * query.shape[-1] ** -0.5 @ key[:, :, :end].transpose(-1, -2)
        mixed.append((scores + mask[start:end, :end]).softmax(-1).to(value.dtype) @ value[:, :, :end])
    return torch.cat(mixed, dim=2)


def random_bytes(*shape: int) -> Tensor:
    """Uniform random bytes; drawing eight at once is far cheaper than one random number for each element."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.uint8)[:count].view(shape)


def drop(x: Tensor, randoms: Tensor | None, rate: float) -> Tensor:
    """Dropout by given random bytes; none, no dropout."""
    if randoms is None:
        return x
    threshold = round(rate * 256)
    return torch.where(randoms >= threshold, x * (256 / (256 - threshold)), 0.0)
