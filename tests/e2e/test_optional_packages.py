"""A CPU alone needs neither Triton nor bitsandbytes, over a gigabyte: no default dependencies, never imported there."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPU_ONLY = ("bitsandbytes", "triton")
NOT_ALWAYS = (*GPU_ONLY, "transformers", "matplotlib", "sentencepiece")
# Modules that a start with warm caches does without. torch itself imports torch.export.
SLOW_TO_IMPORT = (
    *("huggingface_hub", "jinja2", "llguidance", "numba.np.arraymath", "rich", "scipy.linalg", "starlette"),
    *("hetero_ee.calibration.job", "hetero_ee.calibration.stages", "hetero_ee.evaluation", "hetero_ee.sparsity.job"),
    "hetero_ee.serving.server",
)
# Runs the command line with packages that seem not to be installed, then says what of the others was imported.
PROGRAM = """
import json, sys
from importlib.machinery import PathFinder

absent, asked = sys.argv.pop(1).split(","), sys.argv.pop(1).split(",")
find = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name in absent else find(name, path, target)

PathFinder.find_spec = find_spec
from hetero_ee_cli.app import main
try:
    main()
finally:
    print(json.dumps(sorted({*asked} & {*sys.modules})), file=sys.stderr)
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
}


def run(*command: str, absent: str = "", data: Path, asked: tuple[str, ...] = NOT_ALWAYS) -> tuple[str, list[str]]:
    """Standard output of `hetero-ee COMMAND`, and which of the modules `asked` it imported."""
    environment = os.environ | {"HETERO_EE_DATA_DIR": str(data), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, "-c", PROGRAM, absent, ",".join(asked), *command]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


def test_a_plain_installation_holds_no_package_for_gpus_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not [each for each in project["dependencies"] if each.startswith(GPU_ONLY)]
    assert [each.startswith(name) for each, name in zip(extras["gpu"], GPU_ONLY, strict=True)] == [True, True]
    assert "hetero-ee[gpu,sentencepiece,server]" in extras["test"]
    assert "gguf" not in extras and any(each.startswith("gguf") for each in project["dependencies"])  # Q4_K_M needs it


@pytest.mark.usefixtures("converted_demo")
@pytest.mark.sample(0)
def test_text_needs_no_package_for_gpus_and_is_the_same_without(tmp_path: Path) -> None:
    command = ("generate", "Once upon a time", "-n", "12", "--temp", "0.8", "-s", "7")
    text, imported = run(*command, data=tmp_path / "data")
    assert not imported and len(text) > 20
    absent, asked = ",".join((*GPU_ONLY, "transformers")), (*NOT_ALWAYS, *SLOW_TO_IMPORT)
    assert run(*command, absent=absent, data=tmp_path / "data", asked=asked) == (text, [])  # its caches are warm now


@pytest.mark.usefixtures("cache")
@pytest.mark.sample(0)
def test_a_plan_from_a_configuration_needs_no_tokenizer_either(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    command = ("plan", str(tmp_path), "--hardware", "rtx-4060-laptop-8gb", "--json")
    said, imported = run(*command, data=tmp_path / "data")
    assert not imported and json.loads(said)["parts"]
    assert run(*command, absent="bitsandbytes,triton,transformers", data=tmp_path / "data") == (said, [])


@pytest.mark.usefixtures("converted_demo")
@pytest.mark.sample(0)
def test_a_machine_is_measured_without_packages_for_gpus(tmp_path: Path) -> None:
    said, imported = run("profile", "--quick", "--json", absent=",".join(GPU_ONLY), data=tmp_path / "data")
    assert not imported and json.loads(said)["cpu"]


@pytest.mark.parametrize("command", [["--help"], ["generate", "--help"], ["doctor"], ["models"], ["config", "show"]])
@pytest.mark.sample(1)
def test_what_runs_no_model_imports_none_of_them(command: list[str], cache: Path, tmp_path: Path) -> None:
    assert run(*command, data=tmp_path / "data")[1] == []
