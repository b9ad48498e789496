"""A conversation on a terminal, for models with a chat template. An empty line or Ctrl-D ends it.

python examples/chat.py [MODEL]    # a Hugging Face id or a folder; without one, the demo model
"""

import sys

from hetero_ee import Engine

model = sys.argv[1] if len(sys.argv) > 1 else None
with Engine.from_pretrained(model) as engine, engine.chat(max_new_tokens=60, temperature=0.8) as chat:
    for line in sys.stdin:
        if not line.strip():
            break
        for token in chat.send(line.strip()):
            print(token.text, end="", flush=True)
        print()
