"""What holding a text to a schema costs and saves, on the demo model. Prints a table; last line is JSON.

    python -m tests.bench.bench_constrained [--runs 5] [--threads N] [--temperature T]

Milliseconds per token of full and exact mode, with a schema and without, as many tokens, in turns; tokens that a pass
of exact mode brings; the share of tokens that the grammar forces; and what the masks of a text take alone. But for the
times, all is the same in each run.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict

import numpy as np

from hetero_ee import Engine
from tests.json_schemas import Schema, closed, schemas

PROMPT = "Once upon a time there was a little girl who had a dog."
SHORT: Schema = {"type": "string", "maxLength": 40}
CARD = closed(
    {
        "name": SHORT,
        "kind": {"enum": ["dog", "cat", "bird", "fish", "rabbit"]},
        "age_years": {"type": "integer", "minimum": 0, "maximum": 30},
        "is_friendly": {"type": "boolean"},
        "favourite_food": SHORT,
        "owner": closed({"first_name": SHORT, "home_town": SHORT}),
    }
)
KINDS = ("flat-0", "nested-1", "refs-0", "any_of-2", "formats-1", "arrays-3")
WAYS = ("full", "exact")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.7)
    arguments = parser.parse_args()
    engines = {mode: Engine.from_pretrained(threads=arguments.threads, mode=mode, gpu_layers=0) for mode in WAYS}
    every = schemas()
    found = {}
    ways = "full, free | full, held | exact, free | exact, held"
    print(f"| schema | tokens | forced | a pass, free | a pass, held | {ways} | masks alone |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, schema in {"pet": CARD, **{name: every[name] for name in KINDS}}.items():
        row = found[name] = measured(engines, schema, arguments.runs, arguments.temperature)
        times = " | ".join(f"{row[f'{way}_{what}_ms']:.2f}" for way in WAYS for what in ("free", "held"))
        passes = f"{row['pass_free']:.1f} | {row['pass_held']:.1f}"
        print(f"| {name} | {row['tokens']:.0f} | {row['forced']:.0%} | {passes} | {times} | {row['masks_ms']:.3f} |")
    print(json.dumps({"runs": arguments.runs, "temperature": arguments.temperature, **found}))
    for engine in engines.values():
        engine.close()


def measured(engines: dict[str, Engine], schema: Schema, runs: int, temperature: float) -> dict[str, float]:
    """Medians over the runs, each with a seed of its own; milliseconds per token after the first."""
    times: dict[str, list[float]] = defaultdict(list)
    n_tokens, n_forced = 0, 0
    for seed in range(runs):
        sampling = {"temperature": temperature, "seed": seed, "max_new_tokens": 200}
        for mode, engine in engines.items():
            held = engine.generate(PROMPT, json_schema=schema, **sampling)
            if mode == "exact" and (counted := engine.draft_statistics) is not None:
                n_forced += sum(each.n_accepted for each in counted.origins if each.origin == "grammar")
                n_tokens += held.n_generated_tokens
                times["pass_held"].append(counted.tokens_per_pass)
            free = engine.generate(PROMPT, **sampling | {"max_new_tokens": held.n_generated_tokens}, ignore_eos=True)
            if mode == "exact" and (counted := engine.draft_statistics) is not None:
                times["pass_free"].append(counted.tokens_per_pass)
            for what, result in (("held", held), ("free", free)):
                times[f"{mode}_{what}_ms"].append(1000 * result.generation_s / max(1, result.n_generated_tokens - 1))
        times["masks_ms"].append(masks_ms(engines["full"], schema, list(held.token_ids)))
    row = {name: statistics.median(values) for name, values in times.items()}
    return row | {"tokens": n_tokens / runs, "forced": n_forced / n_tokens}


def masks_ms(engine: Engine, schema: Schema, token_ids: list[int]) -> float:
    """Milliseconds per token of a matcher that sees the text again, masks unpacked."""
    constraint = engine.grammars.constraint(engine.default_sampling.changed(json_schema=schema))
    assert constraint is not None
    start_s = time.perf_counter()
    for n in range(len(token_ids)):
        assert np.count_nonzero(constraint.allowed(token_ids[:n]))
    return 1000 * (time.perf_counter() - start_s) / len(token_ids)


if __name__ == "__main__":
    main()
