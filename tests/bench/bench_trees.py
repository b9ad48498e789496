"""Draft trees against sequences alone and against full mode, on an emulated machine: the demo model and its draft head.

    python tests/bench/bench_trees.py [--json] [--profile NAME] [--trees 8 16 32] [--new-tokens N] [--temperature T]

By the emulated clock, which knows no load: per number of layers on the GPU (0: the CPU alone) tokens a pass, seconds a
token over full mode's and over the sequence's, the share of right branches, tokens verified once more; and the formula,
what the stop rule's costs say of the same steps. Raises AssertionError where a token differs from full mode's.
"""

import argparse
import json
from typing import Any

from hetero_ee import Engine
from hetero_ee.planning.limits import Limits
from hetero_ee.speculation.statistics import BRANCH
from hetero_ee_profiles.reference import reference_profile

STORIES = ["Once upon a time", "The big dog", "Tom and his mom went to the store.", "One morning, a rabbit"]


def measured(arguments: argparse.Namespace, gpu_layers: int, tree_tokens: int | None) -> dict[str, Any]:
    """tree_tokens: None is full mode, 0 a sequence alone."""
    mode = "full" if tree_tokens is None else "exact"
    limits = Limits(mode=mode, gpu_layers=gpu_layers, draft_tree=tree_tokens or None)
    profile = reference_profile(arguments.profile)
    with Engine.from_pretrained(threads=1, profile=profile, emulate=True, limits=limits) as engine:
        row: dict[str, Any] = {"gpu_layers": gpu_layers, "tree_tokens": tree_tokens, "texts": []}
        seconds = n_tokens = n_passes = n_right = n_branches = n_verified = 0.0
        for seed, story in enumerate(STORIES):
            options = {"max_new_tokens": arguments.new_tokens, "temperature": arguments.temperature, "seed": seed}
            found = engine.generate(story, **options)
            row["texts"].append(found.token_ids)
            seconds, n_tokens = seconds + found.generation_s, n_tokens + found.n_generated_tokens - 1
            counted = engine.draft_statistics
            if counted is not None:
                n_passes, n_verified = n_passes + counted.n_passes, n_verified + counted.n_verified
                branches = [each for each in counted.origins if each.origin == BRANCH]
                n_branches += sum(each.n_drafted for each in branches)
                n_right += sum(each.n_accepted for each in branches)
        row |= {"seconds_a_token": seconds / n_tokens, "tokens_a_pass": n_tokens / n_passes if n_passes else 1.0}
        row |= {"rows_a_pass": n_verified / n_passes if n_passes else 1.0, "branches": n_branches, "right": n_right}
        rule: Any = None if engine.drafting is None else engine.drafting.rule
        row["formula_s"] = None if rule is None else rule.seconds_per_token
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--profile", default="rtx-4060-laptop-8gb")
    parser.add_argument("--gpu-layers", type=int, nargs="+", default=[0, 3, 6, 9, 12])
    parser.add_argument("--trees", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    rows = []
    for gpu_layers in arguments.gpu_layers:
        full, chain, *trees = (measured(arguments, gpu_layers, n) for n in (None, 0, *arguments.trees))
        for row in (chain, *trees):
            assert row.pop("texts") == full["texts"], f"a token differs with {gpu_layers} layers on the GPU"
            row["over_full"] = full["seconds_a_token"] / row["seconds_a_token"]
            row["over_chain"] = chain["seconds_a_token"] / row["seconds_a_token"]
            rows.append(row)
    if arguments.json:
        print(json.dumps({"profile": arguments.profile, "temperature": arguments.temperature, "rows": rows}))
        return
    print("| layers on the GPU | tree | tokens a pass | rows a pass | right branches | over full | over the sequence |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        counts = f"{row['tokens_a_pass']:.2f} | {row['rows_a_pass']:.1f} | {row['right']:.0f} of {row['branches']:.0f}"
        print(f"| {row['gpu_layers']} | {row['tree_tokens']} | {counts} | {row['over_full']:.2f} | "
              f"{row['over_chain']:.3f} |")  # fmt: skip


if __name__ == "__main__":
    main()
