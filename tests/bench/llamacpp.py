"""llama.cpp's side of a comparison: a random model in its format, its passes by the clock, and whether it runs here.

    python tests/bench/llamacpp.py model.gguf 2     # probes the installed build: passes of 1, 8 and 128 tokens

pip builds it for the machine it is installed on. Where that is a Sapphire Rapids whose AMX a virtual machine does not
give, its own products end the process; BUILD_WITHOUT_AMX makes one that runs.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llamacpp_state import longer_state

from hetero_ee.models.spec import ModelSpec

UNIT_TOKENS = 512  # of a prompt at a time, its own default
PROBED_TOKENS = (1, 8, 128)
MODEL_TENSORS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
WITHOUT_AMX = (
    "NATIVE=OFF AVX2=ON FMA=ON F16C=ON BMI2=ON AVX512=ON AVX512_VNNI=ON AVX512_VBMI=ON AVX512_BF16=ON AVX_VNNI=ON"
)
CMAKE_ARGS = " ".join(f"-DGGML_{each}" for each in WITHOUT_AMX.split())
PIP = ("pip", "install", "--no-cache-dir", "--force-reinstall", "llama-cpp-python")
BUILD_WITHOUT_AMX = f'CMAKE_ARGS="{CMAKE_ARGS}" {" ".join(PIP)}'


class LlamaCpp:
    """One sequence of one model. room_tokens: of the longest context and what is decoded behind it.

    mapped: whether it maps the file, its default, or reads it into memory.
    """

    first_token, n_distinct = 100, 1000  # of a pass; n_distinct different ones follow each other

    def __init__(
        self, file: Path, threads: int, room_tokens: int, *, flash_attention: bool, mapped: bool = True
    ) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)  # kept: what it is called by does not
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_mmap = mapped
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = room_tokens, UNIT_TOKENS, UNIT_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash_attention)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp can't make a context of {room_tokens} tokens of {file}.")
        self._batch = llama_cpp.llama_batch_init(UNIT_TOKENS, 0, 1)
        self._n_held = 0

    def use_threads(self, threads: int) -> None:
        self._api.llama_set_n_threads(self._context, threads, threads)

    def fill(self, n_tokens: int) -> None:
        """Makes the context so long: by decoding what is missing, of a long one the beginning, which is repeated; or
        by forgetting the rest."""
        self._cut(n_tokens)
        for end in sorted({min(n_tokens, UNIT_TOKENS), n_tokens}):
            if end > self._n_held and not (end > UNIT_TOKENS and self._repeat(end)):
                self._decode(end - self._n_held, 0)
            self._n_held = max(self._n_held, end)

    def step(self, m: int, n_wanted: int) -> float:
        """Seconds of m tokens behind the context, with logits of the last n_wanted of them."""
        start_s = time.perf_counter()
        self._decode(m, n_wanted)
        self._api.llama_get_logits(self._context)  # waits for the result
        elapsed_s = time.perf_counter() - start_s
        self._cut(self._n_held)
        return elapsed_s

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _decode(self, n_tokens: int, n_wanted: int) -> None:
        batch = self._batch
        for first in range(0, n_tokens, UNIT_TOKENS):
            batch.n_tokens = min(UNIT_TOKENS, n_tokens - first)
            for row in range(batch.n_tokens):
                number = first + row
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = (
                    self.first_token + number % self.n_distinct,
                    self._n_held + number,
                    1,
                )
                batch.seq_id[row][0], batch.logits[row] = 0, number >= n_tokens - n_wanted
            if self._api.llama_decode(self._context, batch):
                raise RuntimeError(f"llama.cpp can't decode {batch.n_tokens} tokens behind {self._n_held + first}.")

    def _repeat(self, n_tokens: int) -> bool:
        """Whether the context could be made so long by its own keys and values."""
        size = self._api.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        self._api.llama_state_seq_get_data(self._context, state, size, 0)
        try:
            longer = longer_state(bytes(state), n_tokens)
        except ValueError:  # another version's
            return False
        new = (ctypes.c_uint8 * len(longer)).from_buffer_copy(longer)
        return bool(self._api.llama_state_seq_set_data(self._context, new, len(longer), 0) == len(longer))

    def _cut(self, n_tokens: int) -> None:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, 0, n_tokens, -1)
        self._n_held = min(self._n_held, n_tokens)


def system_info() -> str:
    """Which instructions the build uses, in its own words."""
    import llama_cpp

    found: str = llama_cpp.llama_print_system_info().decode().strip()
    return f"llama-cpp-python {llama_cpp.__version__}: {found}"


def check_build(command: Sequence[str]) -> None:
    """Raises SystemExit, with the way out, where the installed build does not survive its own passes.

    command: what tries them, in a process of its own; see probe_command.
    """
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        raise SystemExit(
            f"This build of llama-cpp-python ends in its own decode ({name}), as pip's does on a Sapphire Rapids whose "
            f"AMX fails; --build-llamacpp builds one without AMX, by: {BUILD_WITHOUT_AMX}"
        )
    if ended.returncode:
        raise SystemExit(f"llama-cpp-python does not run here: {ended.stderr.strip() or ended.returncode}")


def probe_command(file: Path, threads: int) -> list[str]:
    return [sys.executable, __file__, str(file), str(threads)]


def build_without_amx(run: Callable[..., Any] = subprocess.run) -> None:
    """Takes minutes. For AVX-512 with VNNI, VBMI and BF16, which every processor with AMX has."""
    environment = os.environ | {"CMAKE_ARGS": CMAKE_ARGS}
    run([sys.executable, "-m", *PIP], env=environment, check=True)


def write_gguf(spec: ModelSpec, file: Path) -> None:
    """A llama of this shape in Q4_0: blocks of 32 random weights, an fp16 scale and 16 bytes of codes each."""
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(spec.max_context_tokens)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(spec.ffn_size)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    random = np.random.default_rng(0)
    for name, (n_rows, n_columns) in _matrices(spec):
        blocks = random.integers(0, 256, (n_rows, n_columns // 32, 18), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(4e-3).tobytes(), np.uint8)
        writer.add_tensor(name, blocks.reshape(n_rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    norms = [f"blk.{layer}.{name}.weight" for layer in range(spec.n_layers) for name in ("attn_norm", "ffn_norm")]
    for name in [*norms, "output_norm.weight"]:
        writer.add_tensor(name, np.ones(spec.hidden_size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, ffn, queries, keys = spec.hidden_size, spec.ffn_size, spec.query_size, spec.kv_size
    shapes = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
    shapes += ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    yield "token_embd.weight", (spec.vocab_size, hidden)
    for layer in range(spec.n_layers):
        for name, shape in zip(MODEL_TENSORS, shapes, strict=True):
            yield f"blk.{layer}.{name}.weight", shape
    yield "output.weight", (spec.vocab_size, hidden)


if __name__ == "__main__":
    probed = LlamaCpp(Path(sys.argv[1]), int(sys.argv[2]), sum(PROBED_TOKENS), flash_attention=True)
    for n in PROBED_TOKENS:
        probed.step(n, n)
