"""Predictor evaluations of mode specee against the size of draft trees, merged and unmerged. Table, plot, JSON.

    python -m tests.bench.bench_tree_judgements [--model DIR --draft-head DIR] [--tokens 96] [--plot FILE.png]

A judgement is one exit layer's look at a tree, a step's tree being of at most `size` drafts. merged: the engine's own
evaluations, one for each root-to-leaf path. unmerged: one for each node of each path. mapped: exits that a separate
mapping of each node would have to tell apart, the product over a path's nodes of the layers that judge, summed up over
paths, of which SpecEE (arXiv 2504.08850, section 6) says that they grow exponentially. Counts, not times: the same on
any machine. The last line is one JSON document.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from hetero_ee import Engine
from hetero_ee.speculation import tree_exits
from hetero_ee_cli.reports.picture import require_matplotlib, save_picture
from hetero_ee_profiles.reference import reference_profile

PROMPTS = ("Once upon a time, there was a little dog", "The big red car", "Lily and her mom went to the park")
SIZES, WIDTH = (3, 5, 7, 9, 11, 13, 15), 4


def measured(model: str | None, head: str | None, size: int, n_tokens: int) -> dict[str, float]:
    """Generate with trees of up to `size` drafts. Return means over judgements."""
    judgements, judge = list[tuple[int, int, int]](), tree_exits.path_confidences

    def counted(*arguments: Any) -> Any:
        found, nodes, paths = judge(*arguments), arguments[3], arguments[-1]
        judgements.append((len(nodes), len(found), sum(map(len, paths))))
        lengths.append([len(path) for path in paths])
        return found

    lengths: list[list[int]] = []
    # Emulated with streamed layers, where rows of a pass cost little and no clock turns trees off.
    options: dict[str, Any] = {"profile": reference_profile("rtx-4060-laptop-8gb"), "emulate": True}
    options |= {"override": r"layers\..*=stream"} | ({"draft_head": head} if head else {})
    tree_exits.path_confidences = counted
    try:
        with Engine.from_pretrained(model, mode="specee", draft_tree=WIDTH, draft_length=size + 1, **options) as engine:
            for prompt in PROMPTS:
                engine.generate(prompt, max_new_tokens=n_tokens)
            statistics = engine.exit_statistics
            assert statistics is not None
            n_layers = sum(n > 0 for n in statistics.judged)
    finally:
        tree_exits.path_confidences = judge
    nodes, merged, unmerged = (mean(column) for column in zip(*judgements, strict=True))
    mapped = mean(sum(n_layers**length for length in each) for each in lengths)
    return {"size": size, "nodes": nodes, "merged": merged, "unmerged": unmerged, "mapped": mapped}


def plotted(rows: list[dict[str, float]], file: Path) -> None:
    figure = require_matplotlib().Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    for name in ("merged", "unmerged"):
        axes.plot([row["size"] for row in rows], [row[name] for row in rows], marker="o", label=name)
    axes.set(xlabel="drafts of a tree, at most", ylabel="predictor evaluations per judgement")
    axes.legend()
    save_picture(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft-head")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    rows = [measured(arguments.model, arguments.draft_head, size, arguments.tokens) for size in arguments.sizes]
    print("| drafts at most | nodes judged | merged | unmerged | mapped |\n|---|---|---|---|---|")
    for row in rows:
        columns = (row["nodes"], row["merged"], row["unmerged"])
        print(f"| {row['size']} | {' | '.join(f'{each:.1f}' for each in columns)} | {row['mapped']:.3g} |")
    if arguments.plot is not None:
        plotted(rows, arguments.plot)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
