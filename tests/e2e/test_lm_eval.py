"""lm-evaluation-harness on local data: in one process, against the server, and transformers beside them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine
from tests.server_support import RunningServer, serving

pytest.importorskip("lm_eval", reason="lm_eval is not installed; pip install 'lm_eval[api]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STORIES = [
    "Once upon a time there was a little dog. He was very happy and he liked to play with his ball in the park.",
    "Tom and Lily went to the zoo with their mom. They saw a big lion.",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of every kind of request that lm_eval makes."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "stories.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in STORIES))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/stories.jsonl}}}}\ntest_split: test\n"
    (folder / "rolling.yaml").write_text(
        f"task: rolling\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{text}}}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    (folder / "said.yaml").write_text(
        f"task: said\n{common}output_type: generate_until\ndoc_to_text: '{{{{text}}}}'\ndoc_to_target: 'no'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n"
    )
    return folder


@pytest.fixture(scope="module")
def server(demo: Path) -> Iterator[RunningServer]:
    with Engine.from_pretrained(demo, threads=1, profile="off") as engine, serving(engine) as running:
        yield running


def measured(task: Path, out: Path, model: str, arguments: str, *more: str) -> dict[str, Any]:
    """By task: results, and what was said of each sample."""
    words = [sys.executable, "-m", "hetero_ee.evaluation.lm_eval_model", "--model", model, "--model_args", arguments]
    words += ["--tasks", "story_endings,rolling,said", "--include_path", str(task), "--log_samples"]
    words += ["--output_path", str(out), *more]
    environment = os.environ | {"HF_DATASETS_CACHE": str(task / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = {}
    for file in out.rglob("samples_*.jsonl"):
        name = file.name.removeprefix("samples_").rpartition("_")[0]
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        found[name] = [each["resps"] for each in sorted(samples, key=lambda each: each["doc_id"])]
    (results,) = out.rglob("results_*.json")
    return found | {"results": json.loads(results.read_text())["results"]}


def test_server_and_process_agree_to_the_last_digit(
    server: RunningServer, demo: Path, task: Path, tmp_path: Path
) -> None:
    for name in ("story_endings.yaml",):
        (task / name).write_text((ROOT / "examples" / "lm_eval" / name).read_text())
    here = measured(task, tmp_path / "here", "hetero_ee", f"pretrained={demo},threads=1,profile=off")
    length = f"max_length={server.engine.executor.most_tokens}"
    there = measured(
        *(task, tmp_path / "there", "local-completions"),
        f"model=any,base_url={server.url}/v1/completions,num_concurrent=2,{length},"
        f"tokenizer_backend=huggingface,tokenizer={demo}",  # the remote one takes a begin token of id 0 for none
    )
    for name in ("story_endings", "rolling", "said"):
        assert here[name] == there[name]
        assert here["results"][name] == there["results"][name]
    # transformers' fp32 beside fp32 weights, and beside the int4 ones that differ by their rounding.
    hf = f"pretrained={demo},dtype=float32,add_bos_token=False,max_length={server.engine.executor.most_tokens - 1}"
    exact = measured(task, tmp_path / "fp32", "hetero_ee", f"pretrained={demo},threads=1,profile=off,quantizer=none")
    public = measured(task, tmp_path / "public", "hf", hf, "--device", "cpu")
    bits = [each["results"]["rolling"]["bits_per_byte,none"] for each in (exact, public, here)]
    assert bits[0] == pytest.approx(bits[1], rel=1e-4) and bits[2] == pytest.approx(bits[1], rel=0.05)
    endings = [each["results"]["story_endings"]["acc,none"] for each in (exact, public, here)]
    assert endings[0] == endings[1] and abs(endings[2] - endings[1]) <= 0.1 and endings[2] > 0.4
    assert exact["said"] == public["said"]
    print(json.dumps({"bits per byte": bits, "story endings": endings}))
