"""The benchmark against llama.cpp on a tiny model: every row is there, contexts stay as long as they are; no time is
judged. Its own half runs everywhere, llama.cpp's where it is installed and survives its own passes."""

import importlib
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.spec import ModelSpec

FOLDER = Path(__file__).parents[1] / "bench"
KINDS = {"ours": "fp16", "another": "int8"}
SPEC: ModelSpec = read_spec(
    {
        "model_type": "llama",
        "vocab_size": 1200,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, kernels: Path) -> Any:
    """Its modules import each other as a script's do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module("bench_vs_llamacpp")
    monkeypatch.setattr(found, "PAUSE_S", 0.0)
    monkeypatch.setattr(found, "STEPS_A_TURN", 1)
    return found


@pytest.fixture
def llamacpp(bench: Any) -> Any:
    return importlib.import_module("llamacpp")


@pytest.fixture
def model_file(llamacpp: Any, tmp_path: Path) -> Path:
    """The tiny model for llama.cpp, where that is installed and survives its own passes."""
    pytest.importorskip("llama_cpp")
    file = tmp_path / "random.gguf"
    llamacpp.write_gguf(SPEC, file)
    try:
        llamacpp.check_build(llamacpp.probe_command(file, 1))
    except SystemExit as error:
        pytest.skip(str(error))
    return file


def test_rows_of_every_context_step_and_number_of_threads(bench: Any) -> None:
    models = {name: bench.OurModel(SPEC, bench.random_weights(SPEC, "int4"), 450, kind) for name, kind in KINDS.items()}
    rows = list(bench.measured(models, [16, 300], [1, 2], 1, 200))
    for model in models.values():
        assert model._cache.length(0) == 300
        model.close()
    places = [(0, ["prefill200"]), (16, list(bench.STEPS)), (300, list(bench.STEPS))]
    expected = [(context, n, step) for context, steps in places for n in (2, 1) for step in steps]
    assert [(row["context"], row["threads"], row["step"]) for row in rows] == expected
    for row in rows:
        assert list(row["seconds"]) == list(KINDS) and list(row["ratios"]) == ["another"]
        assert min(row["seconds"].values()) > 0
        assert bench.table_line(row).count("|") == bench.heading(models).splitlines()[0].count("|")


@pytest.mark.sample(0)
def test_llama_cpp_runs_beside_it(bench: Any, llamacpp: Any, model_file: Path) -> None:
    assert llamacpp.system_info().startswith("llama-cpp-python ")
    models = {"ours": bench.OurModel(SPEC, bench.random_weights(SPEC, "int4"), 900, "fp32")}
    for setting in (False, True):
        models[f"flash attention {setting}"] = llamacpp.LlamaCpp(model_file, 2, 900, flash_attention=setting)
    rows = list(bench.measured(models, [16, 700], [1], 1, 600))
    assert len(rows) == 1 + 2 * len(bench.STEPS) and min(min(row["seconds"].values()) for row in rows) > 0
    for model in models.values():
        model.close()


@pytest.mark.parametrize("flash_attention", [False, True])
def test_a_long_context_is_its_beginning_again(llamacpp: Any, model_file: Path, flash_attention: bool) -> None:
    import llama_cpp

    model = llamacpp.LlamaCpp(model_file, 1, 1600, flash_attention=flash_attention)
    model.fill(512)
    assert model._repeat(1500)
    memory = llama_cpp.llama_get_memory(model._context)
    assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == 1499
    model.fill(512)  # what was there before is as it was
    assert model._repeat(512) and llama_cpp.llama_memory_seq_pos_max(memory, 0) == 511
    model.close()


def test_a_state_of_another_layout_is_refused(llamacpp: Any) -> None:
    longer_state = importlib.import_module("llamacpp_state").longer_state
    head = [0, 0, 1, 2, *(0, 1, 0), *(1, 1, 0), 1, 1]  # two cells, one layer, values transposed
    keys, values = [1, 4, 0, 11, 12], [1, 2, 2, 0x00010002, 0x00030004]
    state = np.array([*head, *keys, *values], "<u4").tobytes()
    found = np.frombuffer(longer_state(state, 4), "<u4").tolist()
    assert found[3:5] == [4, 0] and found[16:18] == [1, 1]
    assert found[18:] == [1, 4, 0, 11, 12, 11, 12, 1, 2, 2, *[0x00010002] * 2, *[0x00030004] * 2]
    for wrong in (state[:-4], state + bytes(4), state[4:], bytes(8)):
        with pytest.raises(ValueError, match="state"):
            longer_state(wrong, 4)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", r"ends in its own decode \(SIGSEGV\).*CMAKE_ARGS"),
        ("raise OSError('no such build')", "does not run here.*no such build"),
    ],
)
def test_a_build_that_does_not_run_is_named(llamacpp: Any, ending: str, message: str) -> None:
    with pytest.raises(SystemExit, match=f"(?s){message}"):
        llamacpp.check_build([sys.executable, "-c", ending])
    llamacpp.check_build([sys.executable, "-c", ""])


def test_the_build_without_amx(llamacpp: Any) -> None:
    calls = []
    llamacpp.build_without_amx(lambda command, **how: calls.append((command, how)))
    ((command, how),) = calls
    assert command[1:3] == ["-m", "pip"] and how["check"]
    assert how["env"]["CMAKE_ARGS"] in llamacpp.BUILD_WITHOUT_AMX and "AMX" not in how["env"]["CMAKE_ARGS"]
