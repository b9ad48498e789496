"""The chat at `/`: it asks for nothing from elsewhere, and its script talks to a server; in Node, not in a browser."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.serving import page
from tests.server_support import RunningServer, eventually, opened, serving, slowed

DRIVER = """
const [url, key, script, plan] = process.argv.slice(1);
const source = require("fs").readFileSync(script, "utf8");
class Part {
  constructor() { Object.assign(this, { value: "", textContent: "", hidden: true, parts: [], listening: {} }); }
  addEventListener(kind, listener) { this.listening[kind] = listener; }
  append(part) { this.parts.push(part); }
  replaceChildren() { this.parts = []; }
  scrollIntoView() {}
}
const ids = {};
const page = { getElementById: (id) => (ids[id] ??= new Part()), createElement: () => new Part() };
page.getElementById("key").value = key;
const asked = (path, options) => fetch(url + path, options);
const begin = new Function("fetch", `${source}; return begin;`)(asked);
const until = async (holds) => { while (!holds()) await new Promise((next) => setTimeout(next, 2)); };
(async () => {
  const send = begin(page);
  for (const { say, stop, clear } of JSON.parse(plan)) {
    ids.text.value = say;
    const sent = send();
    if (stop) {
      await until(() => ids.log.parts.at(-1).textContent.length > 3);
      ids.form.listening.submit({ preventDefault() {} });
    }
    await sent;
    if (clear) ids.clear.listening.click();
  }
  const said = ids.log.parts.map((part) => [part.className, part.textContent]);
  const [status, model, button] = ["status", "model", "send"].map((id) => page.getElementById(id).textContent);
  console.log(JSON.stringify({ said, status, model, button }));
})();
"""


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine, api_key="k") as running:
        running.served.usual = SamplingParams(max_new_tokens=20)
        yield running


def driven(server: RunningServer, *plan: dict[str, Any], key: str = "k") -> dict[str, Any]:
    """What the page shows after these turns."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node here")
    words = [node, "-e", DRIVER, server.url, key, str(page.FOLDER / "page.js"), json.dumps(plan)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_page_asks_for_nothing_from_elsewhere(server: RunningServer) -> None:
    shown, script = server.get("/"), server.get("/page.js")
    assert shown.headers["content-type"].startswith("text/html")
    assert script.headers["content-type"].startswith("text/javascript")
    for each in (shown, script):
        assert "default-src 'none'" in each.headers["content-security-policy"]
        assert "://" not in each.text and "innerHTML" not in each.text
    assert re.findall(r'(?:src|href)="([^"]*)"', shown.text) == ["/page.js"]
    named = set(re.findall(r'at\("(\w+)"\)', script.text))
    assert named <= set(re.findall(r'id="(\w+)"', shown.text)) and len(named) > 5


def test_a_talk_on_the_page_is_the_one_of_the_interface(server: RunningServer) -> None:
    found = driven(server, {"say": "Hello"}, {"say": "More"})
    (_, hello), (_, first), (_, more), (_, second) = found["said"]
    assert (hello, more) == ("Hello", "More")
    ids = server.chat_ids(("user", "Hello"), ("assistant", first), ("user", "More"))
    assert first == server.engine.generate(server.chat_ids(("user", "Hello")), max_new_tokens=20).text
    assert second == server.engine.generate(ids, max_new_tokens=20).text
    assert (found["model"], found["button"]) == ("tiny-model", "Send")
    assert re.fullmatch(r"\d+ tokens read, \d+ cached, 20 generated, [\d.]+ tokens/s", found["status"])


def test_a_reply_is_stopped_and_the_talk_goes_on(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = slowed(server.engine, monkeypatch)
    monkeypatch.setattr(server.served, "usual", SamplingParams(max_new_tokens=200, ignore_eos=True))
    found = driven(server, {"say": "Hello", "stop": True}, {"say": "More", "stop": True})
    assert [kind for kind, _ in found["said"]] == ["user", "assistant"] * 2
    eventually(server.is_idle)
    assert len(passes) < 150  # of 400 tokens


def test_what_goes_wrong_is_shown(server: RunningServer) -> None:
    found = driven(server, {"say": "Hello"}, key="wrong")
    assert found["said"][-1][0] == "error" and "API key is missing or wrong" in found["said"][-1][1]


def test_a_new_chat_begins_empty(server: RunningServer) -> None:
    found = driven(server, {"say": "Hello", "clear": True}, {"say": "Hello"})
    (_, said) = found["said"][1]
    assert len(found["said"]) == 2
    assert said == server.engine.generate(server.chat_ids(("user", "Hello")), max_new_tokens=20).text
