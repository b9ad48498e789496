"""Tiny draft heads with random weights, in memory and on disk, and a model without layers to draft for."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.models.draft_head import FC
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.devices.cpu import host_machine
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_layer import EMBEDDING, DraftHead, DraftHeadLayer
from hetero_ee.speculation.sources.draft_head_opening import draft_vocabulary, head_on_cpu
from hetero_ee.speculation.sources.draft_head_opening import head_weights as prepared_weights
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER
from hetero_ee.weights.weight import DenseWeight

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 61, 48, 76, 6, 2, 8  # awkward: no multiples of a tile
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
NAMES = {
    "fc": FC,
    "fc_bias": f"{FC}_bias",
    "embedding": EMBEDDING,
    "norm": "layers.0.ffn.norm",
    **{part: f"layers.0.attention.{part}" for part in ("qkv", "qkv_bias", "output")},
    **{part: f"layers.0.ffn.{part}" for part in ("gate_up", "down")},
}
MODEL = read_spec(CONFIG | {"num_hidden_layers": 3})


def head_tensors(seed: int = 0) -> dict[str, Tensor]:
    """What a file of EAGLE's holds."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    return {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        "fc.bias": random(HIDDEN),
        "layers.0.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": random(FFN, HIDDEN),
        "layers.0.mlp.up_proj.weight": random(FFN, HIDDEN),
        "layers.0.mlp.down_proj.weight": random(HIDDEN, FFN),
        "layers.0.post_attention_layernorm.weight": 1 + 0.1 * random(HIDDEN),
    }


def save_head(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """Writes config.json, with some fields changed, and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(head_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def head_weights(seed: int = 0, **changes: Tensor) -> DraftHead:
    """The same in memory. changes: of parts by their names in NAMES."""
    tensors = head_tensors(seed)

    def stacked(room: str, parts: tuple[str, ...]) -> Tensor:
        return torch.cat([tensors[f"layers.0.{room}.{part}_proj.weight"] for part in parts])

    parts = {
        "fc": tensors["fc.weight"],
        "fc_bias": tensors["fc.bias"],
        "qkv": stacked("self_attn", ("q", "k", "v")),
        "output": stacked("self_attn", ("o",)),
        "gate_up": stacked("mlp", ("gate", "up")),
        "down": stacked("mlp", ("down",)),
        "norm": tensors["layers.0.post_attention_layernorm.weight"],
    }
    return draft_head_of(dataclasses.replace(MODEL, n_layers=1, sliding_windows=(None,)), parts | changes)


def draft_head_of(spec: ModelSpec, parts: dict[str, Tensor], draft_token_ids: Tensor | None = None) -> DraftHead:
    """A head of these parts, by their names in NAMES."""
    weights = ModelWeights({}, {})
    for short, values in parts.items():
        if values.dim() == 1:
            weights.vectors[NAMES[short]] = values
        else:
            weights.matrices[NAMES[short]] = DenseWeight(values)
    return DraftHead(spec, weights, draft_token_ids)


def part_of(head: DraftHead, short: str) -> Tensor | None:
    """The part of that name in NAMES, None where the head has none."""
    matrix = head.weights.matrices.get(NAMES[short])
    return head.weights.vectors.get(NAMES[short]) if matrix is None else matrix.dequantize()


def draft_head_layer(
    head: DraftHead,
    max_tokens: int,
    pool: Any = None,
    quantizer: str = DEFAULT_QUANTIZER,
    *,
    machine: Machine | None = None,
    on_gpu: bool = False,
) -> DraftHeadLayer:
    """By the CPU's code: the kernels with a pool, else plain torch in fp32. on_gpu: counts as the machine's GPU's."""
    weights = prepared_weights(head, quantizer, compiled=pool is not None)
    executor, embedding = head_on_cpu(head.spec, weights, max_tokens, pool), weights.matrices.get(EMBEDDING)
    place = {"on_gpu": on_gpu, "dialect": head.dialect}
    return DraftHeadLayer(executor, head.spec, embedding, machine or host_machine(), **place)


def head_source(
    layer: DraftHeadLayer, target: Any, draft_token_ids: Tensor | None = None, **more: Any
) -> DraftHeadSource:
    """draft_token_ids: of its vocabulary, None for the model's."""
    vocabulary = None if draft_token_ids is None else draft_vocabulary(target, draft_token_ids)
    return DraftHeadSource(lambda: layer, target, vocabulary, **more)


class BareTarget:
    """An embedding and a head, exact in fp32."""

    def __init__(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = MODEL
        self.cache = CpuKvCache(1, 1, 1, max_tokens=0, kind="fp32")
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.blocks = decoder_blocks(MODEL)

    @property
    def weights(self) -> ModelWeights:
        return ModelWeights({self.blocks[-1].tensors["tokens"].name: DenseWeight(self.head)}, {})

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        assert hidden is None and not layers, "a draft head asks for the embedding alone"
        return self.embedding[list(batch.token_ids)]

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        rows = self.head if end.vocabulary is None else end.vocabulary.rows.dequantize()
        return torch.stack([rows @ row for row in hidden.as_subclass(Tensor)])


def random_head(model: ModelSpec, seed: int) -> DraftHead:
    """A head that knows nothing, and drafts every third token alone."""
    spec, generator = dataclasses.replace(model, n_layers=1, sliding_windows=(None,)), torch.Generator()
    generator.manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    size = spec.hidden_size
    parts = {
        "fc": random(size, 2 * size),
        "qkv": random(spec.query_size + 2 * spec.kv_size, size),
        "output": random(size, spec.query_size),
        "gate_up": random(2 * spec.ffn_size, size),
        "down": random(size, spec.ffn_size),
        "norm": torch.ones(size),
    }
    if spec.qkv_bias:
        parts["qkv_bias"] = torch.zeros(spec.query_size + 2 * spec.kv_size)
    return draft_head_of(spec, parts, torch.arange(0, spec.vocab_size, 3))


def random_head_source(executor: Executor, seed: int) -> DraftHeadSource:
    """Drafts of such a head, in plain torch."""
    head = random_head(executor.spec, seed)
    return head_source(draft_head_layer(head, executor.cache.max_tokens), executor, head.draft_token_ids)


def random_text(n_tokens: int, seed: int = 2) -> tuple[list[int], Tensor]:
    """Tokens, and a state at each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (n_tokens,), generator=generator)
    return tokens.tolist(), torch.randn(n_tokens, HIDDEN, generator=generator)
