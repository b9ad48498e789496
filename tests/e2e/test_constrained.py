"""Texts that keep to a schema or grammar: valid whatever is drawn, the same in every mode, and ended where they end."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.decoding.requests import Continuation
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import EXIT
from hetero_ee_profiles.reference import reference_profile
from tests.chat_support import LINES
from tests.command_line import Cli
from tests.emulation import LAPTOP
from tests.json_schemas import schemas

PROMPT = "Once upon a time"
SCHEMAS = schemas()
SOME = ("flat-0", "nested-1", "any_of-2", "refs-0", "formats-1", "recursive-4")
SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 7}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """full; exact by the draft head and n-grams, and by exits; one early-exit mode."""
    with ExitStack() as opened:

        def emulating(**options: Any) -> Engine:
            options = {"threads": 1, "profile": reference_profile(LAPTOP), "emulate": True} | options
            return opened.enter_context(Engine.from_pretrained(**options))

        head = emulating(limits=Limits(mode="exact"))
        assert head.plan is not None
        exits = replace(head.plan, drafts=EXIT, exit_layer=6, draft_length=5)
        yield {
            "full": opened.enter_context(Engine.from_pretrained(threads=1)),
            "head": head,
            "exits": emulating(plan=exits),
            "calm": emulating(mode="calm"),
        }


@pytest.mark.few(40)
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_said_keeps_to_the_schema(engines: dict[str, Engine], name: str) -> None:
    said = engines["full"].generate(PROMPT, json_schema=SCHEMAS[name], temperature=1.5, seed=len(name))
    assert said.finish_reason == "stop", said.text
    kind = jsonschema.Draft202012Validator
    assert {"time", "date-time", "date", "uuid", "ipv4"} <= set(kind.FORMAT_CHECKER.checkers)
    kind(SCHEMAS[name], format_checker=kind.FORMAT_CHECKER).validate(json.loads(said.text))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("way", ["head", "exits"])
def test_exact_mode_says_what_full_mode_says(engines: dict[str, Engine], way: str, name: str) -> None:
    for sampling in ({"temperature": 0.0}, SAMPLED, SAMPLED | {"top_k": 20, "repeat_penalty": 1.2, "logprobs": 2}):
        asked = {"json_schema": SCHEMAS[name], "max_new_tokens": 150} | sampling
        full, exact = engines["full"].generate(PROMPT, **asked), engines[way].generate(PROMPT, **asked)
        assert (exact.token_ids, exact.text, exact.finish_reason) == (full.token_ids, full.text, full.finish_reason)
        assert exact.logprobs == full.logprobs


def test_forced_tokens_are_drafts_that_are_never_wrong(engines: dict[str, Engine]) -> None:
    for way in ("head", "exits"):
        said = engines[way].generate(PROMPT, json_schema=SCHEMAS["refs-0"], **SAMPLED)
        statistics = engines[way].draft_statistics
        assert statistics is not None
        (forced,) = (each for each in statistics.origins if each.origin == "grammar")
        assert forced.precision == 1 and forced.n_accepted > said.n_generated_tokens / 3


def test_log_probabilities_are_the_models_own(engines: dict[str, Engine]) -> None:
    engine = engines["full"]
    free = engine.generate(PROMPT, max_new_tokens=1, logprobs=20)
    held = engine.generate(PROMPT, max_new_tokens=1, logprobs=20, grammar='start: "{" /a*/')
    assert held.text == "{" and held.logprobs[0].top == free.logprobs[0].top
    assert held.logprobs[0].logprob < free.logprobs[0].top[-1][1]


@pytest.mark.parametrize("way", ["full", "head", "exits"])
def test_texts_of_their_own_grammars_share_passes(engines: dict[str, Engine], way: str) -> None:
    engine, found = engines[way], dict[int, list[int]]()
    loop, ids = engine.loop(), engine.tokenizer.encode(PROMPT)
    asked = [engine.default_sampling.changed(json_schema=SCHEMAS[name], **SAMPLED) for name in SOME[:3]]
    asked.append(engine.default_sampling.changed(max_new_tokens=10))
    numbers = [loop.join(Continuation(engine.executor.cache.open_new(), ids), each)[0] for each in asked]
    while stepped := loop.step():
        for each in stepped:
            assert not isinstance(each.outcome, Exception)
            found.setdefault(each.number, []).append(each.outcome.token_id)
    for number, params in zip(numbers, asked, strict=True):
        assert tuple(found[number]) == engines["full"].generate(PROMPT, params).token_ids


def test_early_exit_keeps_to_the_schema_too(engines: dict[str, Engine]) -> None:
    said = engines["calm"].generate(PROMPT, json_schema=SCHEMAS["flat-0"], **SAMPLED)
    jsonschema.validate(json.loads(said.text), SCHEMAS["flat-0"])


def test_a_text_may_have_no_end_token(engines: dict[str, Engine]) -> None:
    """What ends it is that nothing may follow."""
    said = engines["full"].generate(PROMPT, json_schema=SCHEMAS["constants-0"], ignore_eos=True, **SAMPLED)
    assert said.finish_reason == "stop" and json.loads(said.text)
    assert said.token_ids[-1] != engines["full"].tokenizer.eos_token_id


def test_a_conversation_keeps_to_it(engines: dict[str, Engine]) -> None:
    with engines["full"].chat(json_schema=SCHEMAS["enums-0"], temperature=1.0) as chat:
        for question in ("Hello", "And then?"):
            jsonschema.validate(json.loads(chat.send(question).finish().text), SCHEMAS["enums-0"])


def test_what_can_not_be_held_to_is_refused_at_the_call(engines: dict[str, Engine]) -> None:
    with pytest.raises(UsageError, match="asks for not, which"):
        engines["full"].stream(PROMPT, json_schema={"not": {}})


@pytest.mark.sample(0)
def test_the_command_takes_files(cli: Cli, tmp_path: Any) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMAS["flat-0"]))
    grammar.write_text('start: "Tom" | "Lily"')
    said = cli("generate", PROMPT, "--json-schema-file", schema, "--temp", "1.5")
    jsonschema.validate(json.loads(said.out.removeprefix(PROMPT)), SCHEMAS["flat-0"])
    assert cli("generate", PROMPT, "--grammar-file", grammar).out.removeprefix(PROMPT).strip() in ("Tom", "Lily")
    for content, message in (("{", "which is not JSON"), ('{"not": {}}', "asks for not"), (None, "can't be read")):
        file = tmp_path / "bad.json"
        file.write_text(content) if content is not None else file.unlink()
        ended = cli("generate", PROMPT, "-jf", file)
        assert ended.code == 2 and message in ended.err and len(ended.err.strip().splitlines()) == 1


@pytest.mark.sample(0)
def test_run_answers_by_the_chat_template_and_keeps_to_the_schema(cli: Cli, tmp_path: Any) -> None:
    template = tmp_path / "lines.jinja"
    template.write_text(LINES)
    said = cli("run", "-p", "Hi", "--chat-template-file", template, "--json-schema", '{"type": "boolean"}', "-t", 1)
    assert said.out.strip() in ("true", "false") and "cached tok" in said.err
