"""Text from Python, as a whole and token by token.

python examples/generate.py [MODEL]    # a Hugging Face id or a folder; without one, the demo model
"""

import sys

from hetero_ee import Engine

model = sys.argv[1] if len(sys.argv) > 1 else None
with Engine.from_pretrained(model) as engine:
    result = engine.generate("Once upon a time", max_new_tokens=60)
    print(result.text)
    print(f"[{result.n_generated_tokens} tokens, {result.generated_tokens_per_s:.0f} a second]", file=sys.stderr)

    print("Tom had a dog.", end="")
    for token in engine.stream("Tom had a dog.", max_new_tokens=60, temperature=0.8, seed=7):
        print(token.text, end="", flush=True)
    print()
