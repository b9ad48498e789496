"""The page's Markdown: what it makes of texts, and that no text becomes anything but text, links and their frames."""

import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.serving.page.files import FOLDER
from scripts.browser import Browser, chromium
from tests.server_support import opened, serving

CASES = {
    "# A *b*\n\ntext": "<h3>A <em>b</em></h3><p>text</p>",
    "**a** __b__ _c_ ~~d~~ `e*f*`": "<p><strong>a</strong> <strong>b</strong> <em>c</em> <del>d</del> "
    "<code>e*f*</code></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "- a\n- b\n  1. c\n  2. d\n\nend": "<ul><li><p>a</p></li><li><p>b</p><ol><li><p>c</p></li><li><p>d</p></li></ol>"
    "</li></ul>"
    "<p>end</p>",
    "3. a\n4. b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n\n---\nb": "<p>a</p><hr><p>b</p>",
    "|a|b|\n|:-|-:|\n|1|**2**|\n|3|": '<div class="table"><table><thead><tr><th class="left">a</th><th class="right">'
    'b</th></tr></thead><tbody><tr><td class="left">1</td><td class="right"><strong>2</strong></td></tr><tr>'
    '<td class="left">3</td><td class="right"></td></tr></tbody></table></div>',
    "[x](https://a.example/b?c=d)": '<p><a href="https://a.example/b?c=d" rel="noopener noreferrer nofollow" '
    'target="_blank" title="https://a.example/b?c=d">x</a></p>',
    r"\*not\* \_em\_": "<p>*not* _em_</p>",
    "<b>bold</b> & <!-- c -->": "<p>&lt;b&gt;bold&lt;/b&gt; &amp; &lt;!-- c --&gt;</p>",
}
CODE = "```python\nif a < b:\n    print('<x>')\n```"
ATTACKS = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror=window.pwned=1>",
    "[a](javascript:window.pwned=1)",
    "[a](JaVaScRiPt:window.pwned=1)",
    "[a](java\tscript:window.pwned=1)",
    "[a](\x01javascript:window.pwned=1)",
    "[a](data:text/html,<script>window.pwned=1</script>)",
    "[a](vbscript:x)",
    "[a](//evil.example)",
    "[a](/props)",
    '[a](https://x.example/"onmouseover="window.pwned=1)',
    "![a](https://x.example/pixel.png)",
    "![a](javascript:window.pwned=1)",
    "<https://x.example/><script>",
    "`<svg onload=window.pwned=1>`",
    "```<script>\n</code></pre><script>window.pwned=1</script>\n```",
    '```"onclick="window.pwned=1\nx\n```',
    "|<script>window.pwned=1</script>|b|\n|-|-|\n|<img src=x onerror=window.pwned=1>|2|",
    "# <iframe srcdoc='<script>parent.pwned=1</script>'>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt;",
    "**<style>*{display:none}</style>**",
    "[a](https://x.example\\@evil.example)",
    "https://x.example/<script>window.pwned=1</script>",
)
LONG = (
    *(
        "*" * 20_000,
        "[" * 20_000,
        "`" * 20_000,
        "> " * 5_000,
        "- " * 5_000,
        "![" * 10_000,
        "_a" * 10_000,
        "a|" * 10_000,
    ),
    *("|-" * 10_000, "# " + "#" * 20_000, "\\" * 20_000, "[a](" * 5_000, "~~a" * 7_000, "1. " * 5_000, "h" * 50_000),
    *("https://" * 3_000, "-" * 20_000, "- - " * 5_000, "\n" * 20_000, "  " * 20_000, "`a" * 10_000 + "``"),
    *("|\n" + " " * 100_000 + "-x", "|" * 5_000 + "\n" + "|-" * 5_000 + "\n" + "|\n" * 2),
)
ALLOWED = {"p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "strong", "em", "del", "a", "code", "pre"}
ALLOWED |= {"div", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "span", "button"}


@pytest.fixture(scope="module")
def browser(tiny: Path) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("there is no Chromium here; Debian's package is called chromium")
    with (
        opened(tiny) as engine,
        serving(engine) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(Path(folder)) as running,
    ):
        running.open(server.url)
        running.run(
            "import('/page/render.js').then(({ render }) => { window.made = (source, leaf) => { "
            "const box = document.createElement('section'); document.body.append(box); "
            "box.append(render(document, source, leaf ?? (({ text }) => [document.createTextNode(text)]))); "
            "return box; } })"
        )
        yield running


@pytest.mark.parametrize("source", CASES)
def test_what_markdown_becomes(browser: Browser, source: str) -> None:
    assert browser.run(f"made({json.dumps(source)}).innerHTML") == CASES[source]


def test_code_keeps_its_text_and_can_be_copied(browser: Browser) -> None:
    found = browser.run(
        f"(box => [box.querySelector('pre code').textContent, box.querySelector('figcaption span').textContent, "
        f"box.querySelectorAll('button.copy').length])(made({json.dumps(CODE)}))"
    )
    assert found == ["if a < b:\n    print('<x>')", "python", 1]


@pytest.mark.parametrize("source", ATTACKS)
def test_no_text_becomes_more_than_text(browser: Browser, source: str) -> None:
    found: dict[str, Any] = browser.run(
        f"(box => ({{ tags: [...box.querySelectorAll('*')].map((each) => each.localName), "
        "names: [...box.querySelectorAll('*')].flatMap((each) => each.getAttributeNames()), "
        "links: [...box.querySelectorAll('a')].map((each) => each.href) }))"
        f"(made({json.dumps(source)}))"
    )
    assert set(found["tags"]) <= ALLOWED
    assert not [name for name in found["names"] if name.startswith("on") or name in ("style", "src", "srcdoc")]
    assert all(each.startswith("https://x.example") for each in found["links"])
    browser.run("new Promise((done) => setTimeout(done, 5))")
    assert browser.run("window.pwned") is None


def test_every_piece_of_text_knows_its_place_and_no_text_takes_long() -> None:
    """In Node, on the tree alone: random texts of Markdown's own signs, and long ones of each."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node here")
    drawn, pieces = (
        random.Random(5),
        ["*", "**", "_", "`", "```", "\n", "\n\n", "- ", "1. ", "> ", "#", "# ", "|", "|-|-|"],
    )
    pieces += ["[", "](", ")", "!", "https://a.example", "\\", "~~", "  ", "    ", "a", "word ", "ä😀", "<b>", "---"]
    sources = ["".join(drawn.choices(pieces, k=drawn.randrange(60))) for _ in range(2000)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "markdown.mjs"
        shutil.copy(FOLDER / "markdown.js", copy)
        (Path(folder) / "texts.json").write_text(json.dumps([*sources, *LONG, *ATTACKS]))
        script = """
import { readFileSync } from "fs";
import { parse, isSafe } from "./markdown.mjs";
const walk = (node, see) => {
  if (Array.isArray(node)) node.forEach((each) => walk(each, see));
  else if (node && typeof node === "object") { see(node); Object.values(node).forEach((each) => walk(each, see)); }
};
let slowest = 0;
for (const source of JSON.parse(readFileSync("texts.json", "utf8"))) {
  const start = performance.now();
  const tree = parse(source);
  slowest = Math.max(slowest, performance.now() - start);
  let last = -1;
  walk(tree, (node) => {
    if (node.kind === "link" && !isSafe(node.href)) throw new Error(`${node.href} in ${source}`);
    for (const { text, at } of node.runs ?? []) {
      if (source.slice(at, at + text.length) !== text) throw new Error(JSON.stringify([source, text, at]));
      if (at < last) throw new Error(`out of order: ${JSON.stringify([source, text, at])}`);
      last = at + text.length;
    }
  });
}
console.log(slowest);
"""
        (Path(folder) / "run.mjs").write_text(script)
        done = subprocess.run([node, "run.mjs"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:2000]
    assert float(done.stdout) < 3000  # ms, of a busy machine
