"""Pictures of the server's page with the demo model for docs/images: python -m scripts.screenshot_page [FOLDER]."""

import sys
import tempfile
from pathlib import Path

from hetero_ee import Engine
from scripts.browser import Browser
from tests.emulation import LAPTOP
from tests.server_support import serving

PICTURES = {"page_light": (1280, 800, False), "page_dark": (1280, 800, True), "page_narrow": (360, 740, False)}
STORY = "Once upon a time there was a little robot who wanted to learn to bake bread."


def main(folder: Path) -> None:
    """A reply in exact mode, on an emulated laptop, with a token's candidates shown."""
    with (
        Engine.from_pretrained(threads=1, profile=LAPTOP, emulate=True, mode="exact", gpu_layers=7) as engine,
        serving(engine, chat_template=None, model_name="demo") as server,
        tempfile.TemporaryDirectory() as profile,
        Browser(Path(profile)) as browser,
    ):
        browser.look(*PICTURES["page_light"][:2])
        browser.open(server.url)
        browser.until("document.querySelector('#placement table')")
        browser.run("Object.assign(document.forms.parameters.elements.max_tokens, {value: '120'})")
        browser.run("Object.assign(document.forms.parameters.elements.seed, {value: '4'})")
        browser.run("document.getElementById('text').focus()")
        browser.type(STORY)
        browser.press("Enter")
        browser.until("document.getElementById('status').textContent", 120)
        for name, (width, height, is_dark) in PICTURES.items():
            browser.look(width, height, is_dark=is_dark)
            browser.press("Escape")
            browser.run("document.querySelector('.text').focus()")
            for _ in range(9):
                browser.press("ArrowRight")
            browser.screenshot(folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
