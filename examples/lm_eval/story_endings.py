"""Write story_endings.jsonl from your own stories: each story's last sentence and three last sentences of others.

python examples/lm_eval/story_endings.py STORIES.txt [HOW_MANY]    # a line <|endoftext|> after each story
"""

import json
import re
import sys
from pathlib import Path
from random import Random

FILE = Path(__file__).parent / "story_endings.jsonl"
SEPARATOR = "<|endoftext|>"
N_CHOICES = 4


def items(stories: list[str], n_items: int, seed: int = 0) -> list[dict[str, object]]:
    """Return items from the first stories with at least four sentences and at most 1,200 characters."""
    drawn, split = Random(seed), [re.split(r"(?<=[.!?])\s+", " ".join(story.split())) for story in stories]
    chosen = [each for each in split if len(each) >= 4 and sum(map(len, each)) <= 1200][:n_items]
    found = []
    for number, sentences in enumerate(chosen):
        others = drawn.sample([each[-1] for other, each in enumerate(chosen) if other != number], N_CHOICES - 1)
        answer = drawn.randrange(N_CHOICES)
        endings = [*others[:answer], sentences[-1], *others[answer:]]
        found.append({"story": " ".join(sentences[:-1]), "endings": endings, "answer": answer})
    return found


if __name__ == "__main__":
    stories = Path(sys.argv[1]).read_text(encoding="utf-8").split(SEPARATOR)
    made = items([each.strip() for each in stories if each.strip()], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
    FILE.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in made), encoding="utf-8")
    print(f"{len(made)} items are in {FILE}.")
