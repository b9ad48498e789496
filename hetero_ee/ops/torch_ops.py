"""The operations of a decoder in plain torch, fp32: the reference the fast kernels are checked against.

Exact early exit compares tokens computed in different batches, so a token's bits must not depend on its batch. torch's
matmul gives other bits at m = 1 than at m = 2, and its vector code ends in a scalar tail that rounds otherwise,
wherever memory or a thread's share ends. Hence matrix products and activations here are one row at a time, on memory of
their own.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.models.rope import RopeSpec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.weight import Weight

UNSHARED_ELEMENTS = 2**14  # torch shares an elementwise operation among threads from 2^15 elements on


class TorchOps:
    """x is (m, features), one row a token. Nothing is changed in place but the KV cache."""

    def embed(self, weight: Weight, token_ids: tuple[int, ...]) -> Tensor:
        """(m,) -> (m, hidden)."""
        return weight.rows(torch.tensor(token_ids))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias: (m, K) -> (m, N)."""
        dense = weight.dequantize()
        product = torch.stack([torch.mv(dense, row.clone()) for row in x])  # a clone is aligned, a view need not be
        return product if bias is None else product + bias

    def norm(self, x: Tensor, kind: str, scale: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """RMSNorm (arXiv 1910.07467) or LayerNorm over the last dimension."""
        if kind == "layer":
            return F.layer_norm(x, x.shape[-1:], scale, bias, eps)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return normed if scale is None else normed * scale

    def rope(self, x: Tensor, positions: tuple[int, ...], rope: RopeSpec, context_tokens: int = 0) -> Tensor:
        """Turns pairs (i, i + n/2) of the first n features of every head: (m, heads, head_dim) -> the same."""
        frequencies = torch.tensor(rope.inverse_frequencies(context_tokens))
        angles = torch.tensor(positions, dtype=torch.float32)[:, None] * frequencies
        magnitude = rope.scaling.magnitude
        cosine, sine = angles.cos()[:, None] * magnitude, angles.sin()[:, None] * magnitude
        half = rope.n_features // 2
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)

    def attention(
        self,
        queries: Tensor,
        cache: CpuKvCache,
        layer: int,
        batch: Batch,
        window: int | None,
        scale: float | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        """Each token against its own sequence up to its own position: (m, heads, head_dim) -> the same.

        window: positions seen, the token's own included; None for all. Query heads share key heads in equal groups.
        scale: of scores, None for 1 / sqrt(head_dim); they stay below a cap, if not 0, as cap tanh(score / cap).
        """
        n_heads, head_dim = queries.shape[1:]
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        outputs = []
        for row, sequence, position in batch.entries():
            first = 0 if window is None else max(0, position + 1 - window)
            keys, values = cache.read(layer, sequence, first, position + 1)
            grouped = queries[row].view(keys.shape[0], n_heads // keys.shape[0], head_dim)
            scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            outputs.append(torch.bmm(torch.softmax(scores, -1), values).view(n_heads, head_dim))
        return torch.stack(outputs)

    def activate(self, x: Tensor, spec: ModelSpec) -> Tensor:
        """The FFN between its matrices: act(gate) * up where gated, (m, 2F) -> (m, F); else act, (m, F) -> (m, F)."""
        if not spec.gated or spec.neuron_major:
            return self.activated(x, spec.activation, spec.activation_threshold)
        gate, up = x.chunk(2, dim=-1)
        return self.activated(gate, spec.activation, spec.activation_threshold) * up

    def activated(self, x: Tensor, kind: str, threshold: float) -> Tensor:
        """One activation of each number: (m, F) -> (m, F)."""
        return torch.stack([_activation(row, kind, threshold) for row in x])

    def neurons(self, x: Tensor, active: Tensor, up: Weight | None, down: Weight) -> Tensor:
        """The sum over neurons: x (m, K), active (m, F), 0 where one is skipped, up and down (F, K) -> (m, K)."""
        return self.summed(active if up is None else active * self.linear(x, up), down)

    def summed(self, inner: Tensor, down: Weight) -> Tensor:
        """inner (m, F) times the rows of down (F, K) -> (m, K)."""
        rows = down.dequantize()
        return torch.stack([row @ rows for row in inner])


class BatchedTorchOps(TorchOps):
    """The same mathematics with whole batches to torch's matmul: several times faster for long inputs, but a token's
    last bits depend on its batch. For measuring quality, never for generating."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight.dequantize(), bias)

    def summed(self, inner: Tensor, down: Weight) -> Tensor:
        return inner @ down.dequantize()

    def attention(
        self,
        queries: Tensor,
        cache: CpuKvCache,
        layer: int,
        batch: Batch,
        window: int | None,
        scale: float | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        outputs = torch.empty_like(queries)
        positions = torch.tensor(batch.positions)
        for sequence in sorted(set(batch.sequences)):
            mine = torch.tensor([row for row, owner, _ in batch.entries() if owner == sequence])
            keys, values = cache.read(layer, sequence, 0, int(positions[mine].max()) + 1)
            distance = positions[mine, None] - torch.arange(keys.shape[1])
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            if cap:
                outputs[mine] = _capped_attention(queries[mine], keys, values, seen, scale, cap)
                continue
            attended = F.scaled_dot_product_attention(
                queries[mine].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=seen,
                enable_gqa=True,
                scale=scale,
            )
            outputs[mine] = attended[0].transpose(0, 1)
        return outputs


def _capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float | None, cap: float
) -> Tensor:
    """Of one sequence: (m, heads, head_dim), keys and values (kv_heads, n, head_dim), seen (m, n) -> as queries."""
    m, n_heads, head_dim = queries.shape
    grouped = queries.transpose(0, 1).reshape(keys.shape[0], -1, head_dim)  # a key head's queries, head by head
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * (1 / math.sqrt(head_dim) if scale is None else scale)
    capped = (cap * torch.tanh(scores / cap)).view(n_heads, m, -1).masked_fill(~seen, -math.inf)
    weights = torch.softmax(capped, -1).view(keys.shape[0], -1, keys.shape[1])
    return torch.bmm(weights, values).view(n_heads, m, head_dim).transpose(0, 1)


def _activation(row: Tensor, kind: str, threshold: float) -> Tensor:
    """(F,) -> (F,), in pieces too small for torch to share among threads."""
    return torch.cat([_activate(piece.clone(), kind, threshold) for piece in torch.split(row, UNSHARED_ELEMENTS)])


def _activate(x: Tensor, kind: str, threshold: float) -> Tensor:
    match kind:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "fatrelu":
            return torch.where(x >= threshold, x, 0.0)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "softcap":
            return threshold * torch.tanh(x / threshold)
    raise ValueError(f"no activation called {kind}")
