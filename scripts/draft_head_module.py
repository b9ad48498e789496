"""The draft head as a torch module that can be trained: batches of sequences, unrolled over its own guesses."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_ee.models.spec import ModelSpec

LAYER = "layers.0."
NAMES = {  # of a parameter in EAGLE's files
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    **{f"{part}_proj.weight": f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_proj.weight": f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "norm": f"{LAYER}post_attention_layernorm.weight",
}


class TrainingHead(nn.Module):
    """fc, and one Llama layer without input norm in the shape of the model's. embedding: fixed, (vocab, hidden).

    token_ids: (k,) of the tokens that it has scores of, None for all.
    """

    names = NAMES
    token_ids: Tensor | None = None
    rows: Tensor | None = None  # of the model's lm_head, (k, hidden), None for all

    def __init__(self, spec: ModelSpec, embedding: Tensor) -> None:
        super().__init__()
        size, attended = spec.hidden_size, spec.query_size
        self.spec, self.embedding = spec, embedding
        self.fc = nn.Linear(2 * size, size)
        self.q_proj = nn.Linear(size, attended, bias=False)
        self.k_proj = nn.Linear(size, spec.kv_size, bias=False)
        self.v_proj = nn.Linear(size, spec.kv_size, bias=False)
        self.o_proj = nn.Linear(attended, size, bias=False)
        self.gate_proj = nn.Linear(size, spec.ffn_size, bias=False)
        self.up_proj = nn.Linear(size, spec.ffn_size, bias=False)
        self.down_proj = nn.Linear(spec.ffn_size, size, bias=False)
        self.norm = nn.Parameter(torch.ones(size))

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters under EAGLE's names."""
        return {self.names[name]: values.detach().to(dtype).contiguous() for name, values in self.named_parameters()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Takes the parameters from tensors under EAGLE's names."""
        mine = {name: tensors[self.names[name]].float() for name, _ in self.named_parameters()}
        self.load_state_dict(mine, strict=False)

    def unrolled(self, embedded: Tensor, states: Tensor, n_guesses: int) -> Iterator[Tensor]:
        """Yields n_guesses times (b, n, hidden): the guess at each row when the last 0, 1, ... states are guesses.

        embedded: the newest tokens, (b, n, hidden); states: the model's, that came before them. Row i of guess j sees
        itself, the guessed rows i-1..i-j+1 as earlier guesses left them, and true rows before those.
        """
        held: list[tuple[Tensor, Tensor]] = []
        for _ in range(n_guesses):
            guessed = self._layer(self.fc(torch.cat([embedded, states], -1)), held)
            yield guessed
            states = torch.cat([states[:, :1], guessed[:, :-1].detach().float()], 1)

    def _layer(self, x: Tensor, held: list[tuple[Tensor, Tensor]]) -> Tensor:
        return self.fed_forward(x + self.o_proj(self._attended(x, held).flatten(2)))

    def fed_forward(self, x: Tensor) -> Tensor:
        """The layer's second half, of any rows."""
        normed = self.normed(x, self.norm)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def normed(self, x: Tensor, scale: Tensor) -> Tensor:
        """RMSNorm of any rows, fp32."""
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps) * scale

    def scores(self, guesses: Tensor, head: Tensor) -> Tensor:
        """Logits of guesses (m, hidden), by the model's head (vocab, hidden)."""
        return F.linear(guesses, head)

    def _attended(self, x: Tensor, held: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(b, n, hidden) -> (b, n, heads, head_dim). held: keys and values of earlier guesses, gets this one's too."""
        spec, n_rows = self.spec, x.shape[1]
        queries, keys, values = (
            part(x).view(*x.shape[:2], -1, spec.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = torch.arange(n_rows)
        queries, keys = self.turned(queries, positions), self.turned(keys, positions)
        group = spec.n_heads // spec.n_kv_heads
        held.append((keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)))
        n_guessed = len(held) - 1
        true_keys, true_values = held[0]
        scale = spec.head_dim**-0.5
        mask = torch.full((n_rows, n_rows), -math.inf).triu(1 - n_guessed)
        scores = [queries @ true_keys.transpose(-1, -2) * scale + mask]
        for age, (guessed_keys, _) in enumerate(reversed(held[1:])):
            near = (queries * shifted(guessed_keys, age)).sum(-1, keepdim=True) * scale
            scores.append(near.masked_fill((torch.arange(n_rows) < age)[:, None], -math.inf))
        weights = torch.cat(scores, -1).float().softmax(-1).to(true_values.dtype)
        mixed = weights[..., :n_rows] @ true_values
        for age, (_, guessed_values) in enumerate(reversed(held[1:])):
            mixed = mixed + weights[..., n_rows + age, None] * shifted(guessed_values, age)
        return mixed.transpose(1, 2)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions (n,), as the engine turns them: x (..., n, head_dim)."""
        rope = self.spec.rope
        assert rope is not None, "looked at before a head is made"
        angles = positions[:, None] * torch.tensor(rope.inverse_frequencies())
        cosine, sine = angles.cos() * rope.scaling.magnitude, angles.sin() * rope.scaling.magnitude
        half = rope.n_features // 2
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], -1).to(x.dtype)


def shifted(x: Tensor, n_rows: int) -> Tensor:
    """Row i gets row i - n_rows of x (b, heads, n, head_dim), the first ones zeros."""
    return F.pad(x[:, :, : x.shape[2] - n_rows], (0, 0, n_rows, 0))
