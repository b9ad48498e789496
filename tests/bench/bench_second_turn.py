"""Times the second turn of a long chat with a model of recurrent layers, with and without snapshots of their state.

python -m tests.bench.bench_second_turn [TOKENS] [MODEL]

The model is random unless a folder is given. The template shortens earlier replies, as those do that drop thoughts.
Times are by the wall clock until the second reply's first token, the best of three runs each.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hetero_ee import Engine
from hetero_ee.config.settings import demo_model_folder
from hetero_ee.hub.config_file import read_spec
from hetero_ee_profiles.units import GIB
from tests.e2e.test_snapshots import SHORT
from tests.families import random_model, save_checkpoint

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
}
SAMPLING: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}


def second_turn(folder: Path, n_tokens: int, snapshot_bytes: int) -> tuple[float, int, int]:
    """Return the seconds to the second reply's first token, the tokens read for it, and those of its prompt."""
    with Engine.from_pretrained(
        folder, profile="off", threads=2, quantizer="rtn", context_tokens=n_tokens + 1024
    ) as engine:
        engine.executor.cache.snapshots.budget_bytes = snapshot_bytes  # type: ignore[attr-defined]
        with engine.chat(chat_template=SHORT, **SAMPLING) as chat:
            chat.send("a dog " * (n_tokens // 2)).finish()
            start_s = time.perf_counter()
            reply = chat.send("and then? ")
            next(reply)
            return time.perf_counter() - start_s, reply.n_prefilled_tokens, reply.n_prompt_tokens


def main(n_tokens: int, folder: Path | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        if folder is None:
            demo = demo_model_folder()
            model = random_model("qwen3.5", vocab_size=read_spec(demo).vocab_size, **SHAPE)
            folder = save_checkpoint(model, Path(name), tokenizer_from=demo)
        for budget, label in ((GIB, "with snapshots"), (0, "without")):
            found = [second_turn(folder, n_tokens, budget) for _ in range(3)]
            seconds, n_read, n_prompt = min(found)
            print(f"{label:>15}: {seconds:7.2f} s to the first token, {n_read} of {n_prompt} tokens read")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
