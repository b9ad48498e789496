"""Kernels that are compiled ahead are those of a first token: they are found in the cache and not compiled again."""

import subprocess
import sys
from pathlib import Path

import pytest

from hetero_ee_cpu_ops.ahead import GROUPS

# Runs one token of a small model, compiling what the folder lacks.
PROGRAM = """
import sys, numba
numba.config.CACHE_DIR = sys.argv[1]
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.devices import host_cache
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.weights.random_weights import random_weights
spec = read_spec({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 64})
executor = CpuExecutor(spec, random_weights(spec), 64, 2, cache=host_cache(spec, 64, "fp16"))
executor.prepare()
executor.close()
"""


@pytest.mark.sample(0)
def test_a_first_token_compiles_nothing_more(tmp_path: Path) -> None:
    ahead = [sys.executable, "-m", "hetero_ee_cpu_ops.ahead", str(tmp_path)]
    processes = [subprocess.Popen([*ahead, group], stdin=subprocess.PIPE) for group in GROUPS]
    assert [process.wait(timeout=600) for process in processes] == [0] * len(GROUPS)
    compiled = {file.name for file in tmp_path.iterdir()}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=300)
    assert {file.name for file in tmp_path.iterdir()} == compiled


def test_the_process_ends_with_its_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hetero_ee_cpu_ops.ahead", str(tmp_path), "attention"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60).returncode == 1
