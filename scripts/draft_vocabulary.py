"""Trim a draft head's vocabulary to the tokens that are most frequent in texts.

    python scripts/draft_vocabulary.py --model DIR --head DIR --texts FILE... [--coverage 0.99]

The head's logits are then of these tokens alone, which takes less time; drafts of others are lost (FR-Spec, arXiv
2502.14856). Writes draft_token_ids into the head's config.json; measure its acceptance again afterwards
(scripts/measure_draft_head.py).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stories import read_stories

from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.speculation.sources.draft_head_file import DRAFT_TOKEN_IDS, draft_head_facts
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.tiles import TILE_ROWS


def frequent_tokens(token_lists: Iterable[Sequence[int]], coverage: float, vocab_size: int) -> list[int] | None:
    """Return the fewest tokens that cover this share of the lists, ascending, or None if that needs all of them.

    Their number is a multiple of a tile's rows. Among equally frequent tokens the lowest ids come first.
    """
    counts = Counter(token_id for tokens in token_lists for token_id in tokens)
    wanted, covered, n_tokens = coverage * counts.total(), 0, 0
    order = sorted(range(vocab_size), key=lambda token_id: (-counts[token_id], token_id))
    while n_tokens < vocab_size and (covered < wanted or n_tokens % TILE_ROWS):
        covered += counts[order[n_tokens]]
        n_tokens += 1
    return sorted(order[:n_tokens]) if 0 < n_tokens < vocab_size else None


def written(config: dict[str, Any]) -> str:
    """The text of a config.json, its list of tokens on one line."""
    token_ids = config.get(DRAFT_TOKEN_IDS)
    text = json.dumps(config | {DRAFT_TOKEN_IDS: "#"} if token_ids else config, indent=2)
    return text.replace('"#"', json.dumps(token_ids)) + "\n"


def trim(model: Path, head: Path, texts: Sequence[Path], coverage: float) -> int:
    """Changes the head's config.json; the size of the vocabulary."""
    spec = read_spec(model)
    tokenizer = Tokenizer.load(model, spec.vocab_size)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    token_lists = ([*tokenizer.encode(text), *end] for text in read_stories(texts))
    token_ids = frequent_tokens(token_lists, coverage, spec.vocab_size)
    config = json.loads((head / CONFIG_FILE).read_text())
    config.pop(DRAFT_TOKEN_IDS, None)
    if token_ids is not None:
        config[DRAFT_TOKEN_IDS] = token_ids
    (head / CONFIG_FILE).write_text(written(config))
    return draft_head_facts(head, spec).n_draft_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Trim a draft head's vocabulary.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--head", type=Path, required=True, help="folder of the draft head")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="files whose tokens are counted")
    parser.add_argument("--coverage", type=float, default=0.99, help="share of the texts' tokens; 1 for all that occur")
    given = parser.parse_args()
    print(f"{given.head} drafts {trim(given.model, given.head, given.texts, given.coverage)} tokens.")


if __name__ == "__main__":
    main()
