"""How fast checkpoints become stores: million weights per second, CPU seconds and peak memory of each conversion.

    PYTHONPATH=. python tests/bench/bench_convert.py --folder /tmp/checkpoints

Random Llama checkpoints with the matrices of a 1.1B and a 7B model and few layers, in bf16, GPTQ, AWQ, FP8 and GGUF
types. They stay in the folder. Each conversion is a process of its own; its memory includes torch and Numba (0.4 GB).
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from hetero_ee.config import cache_folder
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from tests.packed_files import CONFIGS, Packing

VOCABULARY, HEADS = 2048, 32
SHAPES = {"1.1B": (2048, 5632, 4, 3), "7B": (4096, 11008, 32, 1)}  # hidden, intermediate, key heads, layers
GGUF_TYPES = {  # of attention and gate; of value and down; of the embedding
    "Q4_0": ("Q4_0", "Q4_0", "Q8_0"),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
}
NAMES = {  # Hugging Face -> GGUF
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}
PACKINGS = {
    "gptq": Packing(method="gptq", group_size=128),
    "awq": Packing(method="awq", symmetric=False, group_size=128),
    "fp8": Packing(method="fp8", block=(128, 128), by="fp8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="such as 7B-bf16")
    parser.add_argument("--convert", type=Path, help="convert this one, and print what it took")
    arguments = parser.parse_args()
    if arguments.convert:
        print(json.dumps(measured(arguments.convert, arguments.threads)))
        return
    names = [f"{shape}-{kind}" for shape in SHAPES for kind in ("bf16", *PACKINGS, *GGUF_TYPES)]
    for name in arguments.only or names:
        file = checkpoint(arguments.folder, name)
        command = [sys.executable, __file__, "--folder", str(arguments.folder), "--threads", str(arguments.threads)]
        done = subprocess.run([*command, "--convert", str(file)], capture_output=True, text=True, check=True)
        print(f"{name:12}", done.stdout.strip(), flush=True)


def measured(file: Path, threads: int) -> dict[str, float]:
    use_kernel_cache(cache_folder())
    folder = gguf_folder(file, configuration_only=True) if file.suffix == ".gguf" else file
    spec, store = read_spec(folder), file.parent / "store"
    n_weights = sum(tensor.n_elements for tensor in all_tensors(decoder_blocks(spec)))
    shutil.rmtree(store, ignore_errors=True)
    start_s, cpu_s = time.perf_counter(), time.process_time()
    convert(folder, spec, store, Quantization.of_model(folder, None), threads=threads)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    shutil.rmtree(store)
    return {
        "M weights": round(n_weights / 1e6),
        "wall s": round(wall_s, 2),
        "CPU s": round(cpu_s, 2),
        "M weights/s": round(n_weights / wall_s / 1e6, 1),
        "peak GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def checkpoint(folder: Path, name: str) -> Path:
    """Return the checkpoint of this name, which is made first if necessary."""
    shape, _, kind = name.partition("-")
    its = folder / name
    done = its / "model.gguf" if kind in GGUF_TYPES else its
    if (its / "complete").exists():
        return done
    its.mkdir(parents=True, exist_ok=True)
    if kind in GGUF_TYPES:
        write_gguf(done, shape, GGUF_TYPES[kind])
    else:
        write_safetensors(its, shape, PACKINGS.get(kind))
    (its / "complete").touch()
    return done


def shapes(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, n_keys, n_layers = SHAPES[shape]
    keys = hidden // HEADS * n_keys
    yield "model.embed_tokens", (VOCABULARY, hidden)
    yield "model.norm", (hidden,)
    for layer in range(n_layers):
        for name, size in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            yield f"model.layers.{layer}.{name}", size


def write_safetensors(folder: Path, shape: str, packing: Packing | None) -> None:
    hidden, inner, n_keys, n_layers = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": n_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": n_keys,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    config |= {"quantization_config": CONFIGS[packing.method](packing)} if packing else {}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, size in shapes(shape):
        if packing and len(size) == 2 and "layers" in name:
            tensors |= {name + suffix: each for suffix, each in RANDOM[packing.method](*size).items()}
        else:
            tensors[f"{name}.weight"] = (torch.randn(size) * 0.02).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def words(*size: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, size, dtype=torch.int64).int()


def random_gptq(n_rows: int, n_columns: int) -> dict[str, Tensor]:
    n_groups = n_columns // 128
    return {
        ".qweight": words(n_columns // 8, n_rows),
        ".qzeros": torch.full((n_groups, n_rows // 8), 0x77777777, dtype=torch.int32),
        ".scales": torch.rand(n_groups, n_rows).half() / 100 + 0.001,
        ".g_idx": (torch.arange(n_columns) // 128).int(),
    }


def random_awq(n_rows: int, n_columns: int) -> dict[str, Tensor]:
    n_groups = n_columns // 128
    return {
        ".qweight": words(n_columns, n_rows // 8),
        ".qzeros": words(n_groups, n_rows // 8),
        ".scales": torch.rand(n_groups, n_rows).half() / 100 + 0.001,
    }


def random_fp8(n_rows: int, n_columns: int) -> dict[str, Tensor]:
    return {
        ".weight": (torch.randn(n_rows, n_columns) * 50).clamp(-448, 448).to(torch.float8_e4m3fn),
        ".weight_scale_inv": torch.rand(-(-n_rows // 128), -(-n_columns // 128)) / 1000 + 1e-4,
    }


RANDOM: dict[str, Callable[[int, int], dict[str, Tensor]]] = {
    "gptq": random_gptq,
    "awq": random_awq,
    "fp8": random_fp8,
}


def write_gguf(file: Path, shape: str, types: tuple[str, str, str]) -> None:
    import gguf

    hidden, inner, n_keys, n_layers = SHAPES[shape]
    writer = gguf.GGUFWriter(file, "llama")
    for key, number in {
        "block_count": n_layers,
        "context_length": 2048,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": HEADS,
        "attention.head_count_kv": n_keys,
        "vocab_size": VOCABULARY,
    }.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1e4)
    for name, size in shapes(shape):
        prefix, _, short = name.partition("layers.")
        layer, _, part = short.partition(".")
        found = f"blk.{layer}.{NAMES[part]}.weight" if short else f"{NAMES[prefix]}.weight"
        if len(size) == 1:
            writer.add_tensor(found, np.ones(size, np.float32))
            continue
        kind = types[2] if not short else types["v_proj" in name or "down" in name]
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(found, random_blocks(*size, number), raw_dtype=number)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def random_blocks(n_rows: int, n_columns: int, kind: Any) -> np.ndarray:
    import gguf

    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (n_rows, n_columns // n_weights, n_bytes), np.uint8)
    blocks[blocks == 128] = 129  # as int8 -128, which no quantizer writes
    first = 208 if kind.name == "Q6_K" else 0
    for at in (first, first + 2) if kind.name == "Q4_K" else (first,):
        scales = random.uniform(1e-4, 2e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(n_rows, -1)


if __name__ == "__main__":
    main()
