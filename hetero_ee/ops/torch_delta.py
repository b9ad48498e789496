"""The gated delta rule and Mamba-2 in plain torch: the reference of the kernels.

Every product has the same shape for each token, so that a token's bits do not depend on its batch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_ee.kv.recurrent import RecurrentCache
from hetero_ee.layers.delta import GatedDeltaSpec
from hetero_ee.layers.ops import Norm
from hetero_ee.layers.state import LOG_TOKENS

KEY_EPS = 1e-6  # added to the squared length of queries and keys


@dataclass(frozen=True, slots=True)
class TorchDelta:
    """One layer's gated delta rule, and the cache with its state. See Ops.delta_rule."""

    spec: GatedDeltaSpec
    layer: int
    cache: RecurrentCache
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Norm

    def run(self, inputs: Tensor, gates: Tensor, sequence: int, first: int) -> Tensor:
        """Apply the rule to consecutive tokens of one sequence, from position `first` on.

        Args:
            inputs, gates: see Ops.gated_delta.

        Returns:
            Outputs (n_tokens, n_value_heads, value_dim) before their norm.
        """
        spec, index = self.spec, self.cache.index(self.layer)
        storage = self.cache.storage(sequence)
        keys, deltas, decays = (part[index] for part in (storage.keys, storage.deltas, storage.decays))
        base, new_base = self.cache.begin(self.layer, sequence, first, len(inputs))
        mixed = causal_conv(self.cache, self.layer, sequence, first, inputs[:, : spec.n_channels], self.conv)
        matrix, outputs = read_matrix(storage.matrices[index], spec.value_dim), []
        for position in range(base, first + len(inputs)):  # `matrix` is that before this position
            if position == new_base:
                write_matrix(storage.matrices[index], matrix)
            at = position % LOG_TOKENS
            if position >= first:
                query, key, value = self._heads(mixed[position - first].clone())
                decay, beta = self._gates(gates[position - first].clone())
                delta = (value - self._replaced(key, matrix, decay)) * beta[:, None]
                overlap = (key * query).sum(-1, keepdim=True)
                outputs.append(self._output(decay[:, None] * _read(query, matrix) + delta * overlap, value))
                keys[at], deltas[at], decays[at] = key[self._first_readers()].flatten(), delta.flatten(), decay
            key = keys[at].view(spec.n_key_heads, spec.key_dim)[self._key_heads()]
            delta = deltas[at].view(spec.n_value_heads, spec.value_dim)
            matrix = matrix * decays[at][:, None, None] + key[:, :, None] * delta[:, None, :]
        self.cache.moved(self.layer, sequence, new_base)
        return torch.stack(outputs)

    def _key_heads(self) -> Tensor:
        """Return the key head that each value head reads."""
        heads = torch.arange(self.spec.n_value_heads)
        n_key_heads = self.spec.n_key_heads
        return heads % n_key_heads if self.spec.is_tiled else heads // (self.spec.n_value_heads // n_key_heads)

    def _first_readers(self) -> Tensor:
        """Return the first value head that reads each key head."""
        heads = torch.arange(self.spec.n_key_heads)
        return heads if self.spec.is_tiled else heads * (self.spec.n_value_heads // self.spec.n_key_heads)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a token's queries, keys and values by value head: (n_value_heads, key_dim or value_dim)."""
        spec = self.spec
        query, key, value = self._parts(F.silu(mixed))
        query, key = (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + KEY_EPS) for part in (query, key))
        return query * spec.key_dim**-0.5, key, value

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec, size = self.spec, self.spec.n_key_heads * self.spec.key_dim
        parts = torch.split(mixed, [size, size, spec.value_size])
        query, key = (part.view(-1, spec.key_dim)[self._key_heads()] for part in parts[:2])
        return query, key, parts[2].view(-1, spec.value_dim)

    def _replaced(self, key: Tensor, matrix: Tensor, decay: Tensor) -> Tensor:
        """Return what the decayed matrix returns for a key, which the token's value replaces."""
        return decay[:, None] * _read(key, matrix)

    def _output(self, read: Tensor, value: Tensor) -> Tensor:
        return read

    def _gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token's decay and beta (n_value_heads,)."""
        beta, decay = gates.chunk(2)
        return torch.exp(-self.a_log.exp() * F.softplus(decay + self.dt_bias)), torch.sigmoid(beta)


@dataclass(frozen=True, slots=True)
class TorchMamba(TorchDelta):
    """One layer's Mamba-2, and the cache with its state. See Ops.mamba_rule. Its gates are the inputs of time steps."""

    skips: Tensor
    conv_bias: Tensor | None

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._parts(F.silu(mixed if self.conv_bias is None else mixed + self.conv_bias))

    def _gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        step = F.softplus(gates + self.dt_bias)
        return torch.exp(-self.a_log.exp() * step), step

    def _replaced(self, key: Tensor, matrix: Tensor, decay: Tensor) -> Tensor:
        return torch.zeros(())

    def _output(self, read: Tensor, value: Tensor) -> Tensor:
        return read + self.skips[:, None] * value


@dataclass(frozen=True, slots=True)
class TorchConv:
    """One layer's short convolution, and the cache with its last inputs."""

    layer: int
    cache: RecurrentCache
    weights: Tensor

    def run(self, inputs: Tensor, sequence: int, first: int) -> Tensor:
        """Return c * conv(b * x) for consecutive tokens, from position `first` on. See Ops.short_conv."""
        b, c, x = inputs.chunk(3, 1)
        _, base = self.cache.begin(self.layer, sequence, first, len(inputs))
        mixed = causal_conv(self.cache, self.layer, sequence, first, b * x, self.weights)
        self.cache.moved(self.layer, sequence, base)
        return c * mixed


def _read(key: Tensor, matrix: Tensor) -> Tensor:
    """Return S^T k for each head: key (n, key_dim), matrix (n, key_dim, value_dim) -> (n, value_dim)."""
    return torch.bmm(key[:, None], matrix)[:, 0]


def causal_conv(
    cache: RecurrentCache, layer: int, sequence: int, first: int, inputs: Tensor, weights: Tensor
) -> Tensor:
    """Mix each channel of consecutive tokens with its last inputs, and store the inputs.

    Args:
        inputs: (n_tokens, channels) of tokens from position `first` on.
        weights: (channels, kernel), the last of them for the token itself.
    """
    kept, before = cache.storage(sequence).inputs[cache.index(layer)], weights.shape[1] - 1
    positions = torch.arange(first - before, first)
    earlier = kept[positions % len(kept)] * (positions >= 0)[:, None]
    window = torch.cat([earlier, inputs])
    mixed = torch.zeros_like(inputs)
    for offset, weight in enumerate(weights.T):
        mixed += window[offset : offset + len(inputs)] * weight
    last = inputs[-len(kept) :]
    end = first + len(inputs)
    kept[torch.arange(end - len(last), end) % len(kept)] = last
    return mixed


def read_matrix(blocks: Tensor, value_dim: int) -> Tensor:
    """Return matrices (n_heads, key_dim, value_dim) that are stored in blocks of columns."""
    n_heads, n_blocks, key_dim, lanes = blocks.shape
    return blocks.transpose(1, 2).reshape(n_heads, key_dim, n_blocks * lanes)[..., :value_dim].clone()


def write_matrix(blocks: Tensor, matrix: Tensor) -> None:
    """Store matrices (n_heads, key_dim, value_dim) in blocks of columns."""
    n_heads, n_blocks, key_dim, lanes = blocks.shape
    padded = F.pad(matrix, (0, n_blocks * lanes - matrix.shape[-1]))
    blocks.copy_(padded.view(n_heads, key_dim, n_blocks, lanes).transpose(1, 2))
