"""The page at `/` in headless Chromium: talks, keys, tokens and their candidates; it asks nothing of anyone else."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.metrics import MetricFamilies
from hetero_ee.serving.models import Models
from hetero_ee.serving.page.files import FILES, FOLDER
from hetero_ee.serving.served_model import ServedModel
from hetero_ee_cli.terminal.chat_file import load_chat
from scripts.browser import Browser, chromium
from tests.chat_support import LINES
from tests.server_support import RunningServer, chosen_settings, eventually, listening, opened, serving, slowed

ADDRESS_OF_SVG = "http://www.w3.org/2000/svg"
IDLE = "document.getElementById('send').textContent === 'Send'"


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine, api_key="k", page_temperature=0.0) as running:
        running.served.usual = SamplingParams(max_new_tokens=20)
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("there is no Chromium here; Debian's package is called chromium")
    # Its helpers may write there for a moment after it has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(Path(folder)) as running:
        running.look(1280, 800)
        yield running


@pytest.fixture
def page(server: RunningServer, browser: Browser) -> Iterator[Browser]:
    """Open, with the key given. In the end nothing was asked elsewhere and no rule of the page's was broken."""
    browser.events.clear()
    browser.open(server.url)
    browser.until("!document.getElementById('key').hidden")
    browser.run("Object.assign(document.getElementById('key'), {value: 'k'}).dispatchEvent(new Event('change'))")
    browser.until("document.querySelector('#placement p')")
    yield browser
    browser.run("1")  # what was said before it has come
    asked = [
        each["params"]["request"]["url"] for each in browser.events if each["method"] == "Network.requestWillBeSent"
    ]
    assert asked and all(each.startswith(server.url) for each in asked)
    told = [each["params"] for each in browser.events if each["method"] == "Runtime.exceptionThrown"]
    assert not told and not [each for each in browser.events if "Content Security Policy" in str(each)]


def say(page: Browser, text: str, *, waits: bool = True) -> None:
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter")
    if waits:
        page.until(f"{IDLE} && document.getElementById('status').textContent.includes('generated')")
        settled(page)


def settled(page: Browser) -> None:
    """Until what came is drawn."""
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def said(page: Browser) -> list[list[str]]:
    found: list[list[str]] = page.run(
        "[...document.querySelectorAll('#log > *')].map((each) => "
        "[each.className, (each.querySelector('.text, .said') ?? each).textContent])"
    )
    return found


def test_the_files_are_the_pages_and_name_nothing_elsewhere(server: RunningServer) -> None:
    assert set(FILES.values()) == {each.name for each in FOLDER.iterdir()}
    for path, name in FILES.items():
        answer = server.get(path)
        assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        text = answer.text.replace(ADDRESS_OF_SVG, "").replace("http" + r"s?:\/\/", "")
        assert (
            "://" not in text and "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
        )
        assert set(re.findall(r'(?:src|href|from)[= ]"([^"]*)"', text)) <= set(FILES), name
    assert server.get("/page/nothing.js").status_code == 401  # as all but the page is without the key
    named = set(re.findall(r'at\("([\w-]+)"\)', "".join(each.read_text() for each in FOLDER.glob("*.js"))))
    assert named <= set(re.findall(r'id="([\w-]+)"', server.get("/").text)) and len(named) > 10


def test_a_talk_is_the_one_of_the_interface_and_can_be_asked_for_again(server: RunningServer, page: Browser) -> None:
    say(page, "Hello")
    say(page, "More")
    (_, hello), (_, first), (_, more), (_, second) = said(page)
    assert (hello, more) == ("Hello", "More")
    usual = {"max_new_tokens": 20}
    asked = server.chat_ids(("user", "Hello"))
    assert _plain(first) == _plain(server.engine.generate(asked, **usual).text)
    page.run("document.getElementById('regenerate').click()")
    page.until(IDLE)
    settled(page)
    assert [kind for kind, _ in said(page)] == ["user", "assistant"] * 2 and said(page)[3][1] == second  # greedy
    status = page.run("document.getElementById('status').textContent")
    assert re.fullmatch(r"\d+ tokens read, \d+ cached, 20 generated, [\d.]+ tokens/s", status)
    page.run("document.getElementById('clear').click()")
    assert said(page) == []


def click(page: Browser, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")


def test_a_message_can_be_edited(server: RunningServer, page: Browser) -> None:
    say(page, "Hello")
    say(page, "More")
    page.type("a draft")
    click(page, ".user .edit")
    assert page.run("document.getElementById('text').value") == "Hello" and len(said(page)) == 4
    page.press("Escape")
    assert page.run("document.getElementById('text').value") == "a draft" and not page.run(
        "document.querySelector('.editing')"
    )
    click(page, ".user .edit")
    page.run("document.getElementById('text').value = ''")
    say(page, "Bye")
    (_, asked), (_, answer) = said(page)
    expected = server.engine.generate(server.chat_ids(("user", "Bye")), max_new_tokens=20).text
    assert asked == "Bye" and _plain(answer) == _plain(expected)
    assert page.run("document.getElementById('text').value") == "a draft"


def test_chats_stay_in_the_browser_and_can_be_exported(server: RunningServer, page: Browser, tmp_path: Path) -> None:
    page.run("localStorage.clear()")
    page.run("document.forms.parameters.elements.system.value = 'Be kind'")
    say(page, "Hello")
    first = said(page)
    click(page, "#clear")
    say(page, "Bye")
    page.open(f"{server.url}/?again")  # a new page
    titles = "[...document.querySelectorAll('#saved .open')].map((each) => each.textContent.split(' ')[0])"
    page.until(f"{titles}.length")
    assert page.run(titles) == ["Bye", "Hello"] and said(page) == []
    click(page, "#saved li:last-child .open")
    settled(page)
    assert said(page) == first
    assert page.run("document.forms.parameters.elements.system.value") == "Be kind"
    click(page, "#saved .delete")
    assert len(page.run(titles)) == 1
    text = page.run(
        "import('/page/saved.js').then(({ fileOf, SavedChats }) => "
        "fileOf(new SavedChats(localStorage).list().at(-1), { temperature: 0.5, max_tokens: 9, stop: ['x'] }))"
    )
    file = tmp_path / "chat.json"
    file.write_text(text)
    with server.engine.chat(chat_template=LINES) as talk:
        load_chat(str(file), talk)
        assert [each.content for each in talk.messages][:2] == ["Be kind", "Hello"]
        assert (talk.sampling.temperature, talk.sampling.max_new_tokens, talk.sampling.stop) == (0.5, 9, ("x",))


def test_the_usual_temperature_is_the_models_or_that_of_chats(tiny: Path) -> None:
    with opened(tiny) as engine:
        for given, expected in ((None, 0.8), (0.0, 0.0), (0.3, 0.3)):
            with serving(engine, page_temperature=given) as server:
                assert server.get("/props").json()["page_temperature"] == expected
        engine.default_sampling = SamplingParams(temperature=0.6)
        with serving(engine) as server:
            assert server.get("/props").json()["page_temperature"] == 0.6


def test_one_of_several_models_is_chosen(tiny: Path, browser: Browser) -> None:
    def open_model(name: str, families: MetricFamilies) -> ServedModel:
        named = chosen_settings(model_name=name, page_temperature=0.0)
        return ServedModel(opened(tiny), named, SamplingParams(max_new_tokens=4), LINES, families)

    models = Models(chosen_settings(), ["a", "b"], open_model)
    try:
        with listening(models) as url:
            browser.open(url)
            browser.until("document.querySelector('#placement p')")
            assert browser.run("[...document.querySelectorAll('#models option')].map((each) => each.value)") == [*"ab"]
            browser.run(
                "Object.assign(document.getElementById('models'), {value: 'b'}).dispatchEvent(new Event('change'))"
            )
            say(browser, "Hello")
            assert [models.status(name) for name in "ab"] == ["unloaded", "loaded"]
    finally:
        models.close()


def test_a_model_without_a_template_is_explained(tiny: Path, browser: Browser) -> None:
    with opened(tiny) as engine, serving(engine, chat_template=None) as server:
        browser.open(server.url)
        browser.until("!document.getElementById('notice').hidden")
        assert browser.run("document.getElementById('send').disabled")
        assert "has no chat template" in browser.run("document.getElementById('notice').textContent")


def test_escape_stops_a_reply_and_the_talk_goes_on(
    server: RunningServer, page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = slowed(server.engine, monkeypatch)
    monkeypatch.setattr(server.served, "usual", SamplingParams(max_new_tokens=200, ignore_eos=True))
    for text in ("Hello", "More"):
        say(page, text, waits=False)
        page.until("[...document.querySelectorAll('.text')].at(-1)?.textContent.length > 3")
        assert page.run("document.getElementById('send').textContent") == "Stop"
        page.press("Escape")
        page.until(IDLE)
    assert [kind for kind, _ in said(page)] == ["user", "assistant"] * 2
    eventually(server.is_idle)
    assert len(passes) < 150  # of 400 tokens


def test_shift_and_enter_begin_a_line(page: Browser) -> None:
    page.run("document.getElementById('text').focus()")
    page.type("a")
    page.press("Enter", shift=True)
    page.type("b")
    assert page.run("document.getElementById('text').value") == "a\nb" and said(page) == []


def test_what_goes_wrong_is_shown(page: Browser) -> None:
    page.run("document.forms.parameters.elements.temperature.value = '-1'")
    say(page, "Hello", waits=False)
    page.until("document.querySelector('.error')")
    assert "temperature" in said(page)[-1][1] and [kind for kind, _ in said(page)] == ["user", "error"]
    page.run("document.forms.parameters.elements.temperature.value = ''")
    page.run("document.getElementById('key').value = 'wrong'")
    say(page, "Hello", waits=False)
    page.until("document.querySelectorAll('.error').length === 2")
    assert "API key is missing or wrong" in said(page)[-1][1]


def test_parameters_are_asked_for(server: RunningServer, page: Browser) -> None:
    values = {"system": "Be kind", "max_tokens": 7, "temperature": 0.8, "seed": 3, "repeat_penalty": 1.2}
    for name, value in values.items():
        page.run(f"document.forms.parameters.elements.{name}.value = {str(value)!r}")
    say(page, "Hello")
    asked = server.chat_ids(("system", "Be kind"), ("user", "Hello"))
    sampling = {name: value for name, value in values.items() if name not in ("system", "max_tokens")}
    expected = server.engine.generate(asked, max_new_tokens=7, **sampling)  # type: ignore[arg-type]
    assert _plain(said(page)[1][1]) == _plain(expected.text)


def test_each_token_has_its_candidates(server: RunningServer, page: Browser) -> None:
    say(page, "Hello")
    result = server.engine.generate(server.chat_ids(("user", "Hello")), max_new_tokens=20, logprobs=5)
    spans = page.run("[...document.querySelectorAll('.token[data-token]')].map((each) => Number(each.dataset.token))")
    assert spans and max(spans) < result.n_generated_tokens and len(set(spans)) > 5
    number = spans[3]
    box = page.run(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])("
        "[...document.querySelectorAll('.token[data-token]')][3].getClientRects()[0])"
    )
    page.point(*box)
    page.until("!document.getElementById('candidates').hidden")
    shown = page.run("document.getElementById('candidates').textContent")
    assert f"full depth, after {server.engine.spec.n_layers} of" in shown
    rows = page.run("[...document.querySelectorAll('#candidates tr')].map((row) => row.lastChild.textContent)")
    assert len(rows) == 5 and rows == sorted(rows, key=lambda each: -float(each.split()[0]))
    assert len(result.logprobs[number].top) == 5
    page.press("Escape")
    assert page.run("document.getElementById('candidates').hidden")
    page.run("document.querySelector('.text').focus()")
    page.press("ArrowRight")
    assert page.run("document.querySelector('.token.chosen').dataset.token") == str(spans[0])


def test_tokens_find_their_place_behind_thoughts_and_marks(page: Browser) -> None:
    texts = ["<think>", "Hm", " so", "</think>", "\n\n", "So", " it", " is."]
    found = page.run(
        f"import('/page/tokens.js').then(({{ align }}) => {{ const tokens = {texts}.map((text) => ({{ text }}));"
        "align(tokens, 'Hm so', 'So it is.'); return tokens.map((each) => [each.start, each.end]); })"
    )
    assert found == [[0, 0]] * 5 + [[0, 2], [2, 5], [5, 9]]


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_its_window_and_everything_has_a_name(page: Browser, width: int) -> None:
    page.look(width, 740, is_dark=width == 360)
    try:
        say(page, "Hello" + "o" * 300)
        page.run("document.getElementById('show-settings').click()")
        for shows in ("show-engine", "show-engine"):
            assert page.run("document.documentElement.scrollWidth") <= width
            page.run(f"document.getElementById('{shows}').click()")
        nameless = page.run(
            "[...document.querySelectorAll('button, input, textarea, meter')].filter((each) => "
            "!each.getAttribute('aria-label') && !each.labels?.length && !each.textContent.trim()).map((e) => e.id)"
        )
        assert nameless == []
        page.run("document.getElementById('text').focus()")
        page.press("Tab")
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    finally:
        page.look(1280, 800)


def _plain(text: Any) -> str:
    """What no rendering of Markdown takes away."""
    return re.sub(r"[^\w]", "", str(text)).replace("_", "")
