"""Generate two texts at a time with asyncio. The event loop stays free, and a cancelled request ends.

python examples/asyncio_stream.py [MODEL]    # a Hugging Face id or a folder; without one, the demo model
"""

import asyncio
import sys

from hetero_ee import Engine

TIMEOUT_S = 30.0


async def tell(engine: Engine, prompt: str) -> str:
    text = prompt
    async for token in engine.astream(prompt, max_new_tokens=40):
        text += token.text
    return text


async def main(model: str | None) -> None:
    with Engine.from_pretrained(model) as engine:
        async with asyncio.timeout(TIMEOUT_S):  # its end cancels both texts
            for text in await asyncio.gather(tell(engine, "Once upon a time"), tell(engine, "Tom had a dog.")):
                print(text)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
