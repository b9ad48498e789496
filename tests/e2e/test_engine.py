"""Engine: what generate and stream promise, on a random model with a real tokenizer."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from hetero_ee import Engine, GenerationResult, HeteroError, ModelError, SamplingParams, UsageError
from hetero_ee.decoding.result import FinishReason, GeneratedToken
from hetero_ee.planning.limits import Limits
from hetero_ee_profiles.host.process import physical_core_count, processor_count
from hetero_ee_profiles.reference import reference_profile

PROMPT = "Once upon a time"
PROMPTS = ["Once upon a time", "The", "Lily and Tom went to the park. They saw a big dog and", "No!"]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(engine: Engine) -> GenerationResult:
    """What the model says after PROMPT."""
    return engine.generate(PROMPT, max_new_tokens=60)


def kv_bytes(engine: Engine) -> int:
    return engine.executor.cache.n_bytes


def test_arrays_of_token_ids_are_prompts(engine: Engine, whole: GenerationResult) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    for array in (np.array(ids), torch.tensor(ids), list(np.array(ids)), tuple(ids)):
        found = engine.generate(array, max_new_tokens=60)  # type: ignore[arg-type]
        assert found.token_ids == whole.token_ids and str(found) == whole.text
    assert [str(each) for each in engine.generate(torch.tensor([ids, ids]), max_new_tokens=60)] == [whole.text] * 2  # type: ignore[arg-type]
    assert joined(list(engine.stream(np.array(ids), max_new_tokens=60))) == whole.text
    with pytest.raises(UsageError, match="prompt is"):
        engine.generate(np.array(ids, np.float32))


def test_logprobs_of_a_text_are_those_of_generating_it(engine: Engine) -> None:
    written = engine.generate(PROMPT, max_new_tokens=8, logprobs=2, ignore_eos=True)
    ids = [*engine.tokenizer.encode(PROMPT), *written.token_ids]
    found = engine.logprobs(ids, n_top=2)
    assert len(found) == len(ids) - 1 and len(engine.logprobs(PROMPT)) == engine.count_tokens(PROMPT) - 1
    for ours, theirs in zip(found[-8:], written.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
    assert kv_bytes(engine) == 0
    with pytest.raises(UsageError, match="logprobs is -1; expected"):
        engine.logprobs(PROMPT, -1)


def joined(tokens: list[GeneratedToken]) -> str:
    return "".join(token.text for token in tokens)


def prompt_of(n_tokens: int, engine: Engine) -> str:
    return next(text for text in map(" the".__mul__, range(n_tokens + 1)) if engine.count_tokens(text) == n_tokens)


@pytest.mark.parametrize("n_asked", [0, 1000])
def test_at_most_as_many_threads_run_as_there_are_processors(tiny: Path, n_asked: int) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"quantizer": "none", "threads": n_asked, "limits": Limits(threads=n_asked)}
    options["profile"] = reference_profile("rtx-3060-12gb")
    with Engine.from_pretrained(tiny, progress=lambda stage, n_done, n_all: said.append(stage), **options) as engine:
        most = processor_count() if n_asked else physical_core_count()
        assert engine.plan is not None and engine.threads == engine.plan.threads == most
    found = [each for each in said if "threads were requested" in each]
    assert (
        found
        == [f"1000 threads were requested, but this process has only {most} processors; {most} threads run"][:n_asked]
    )


def test_a_string_gives_a_result_and_a_list_gives_a_list(engine: Engine, whole: GenerationResult) -> None:
    assert whole.n_generated_tokens == len(whole.token_ids) == 60
    assert whole.finish_reason == FinishReason.LENGTH == "length"
    assert whole.n_prompt_tokens == engine.count_tokens(PROMPT)
    assert whole.prompt_s > 0 and whole.generation_s > 0
    assert whole.generated_tokens_per_s == pytest.approx(59 / whole.generation_s)
    (listed,) = engine.generate([PROMPT], max_new_tokens=60)
    assert (listed.text, listed.token_ids) == (whole.text, whole.token_ids)


def test_the_text_is_that_of_the_tokens(engine: Engine, whole: GenerationResult) -> None:
    prompt = engine._tokenizer.encode(PROMPT)
    decode = engine._tokenizer.decode
    assert whole.text == decode(prompt + list(whole.token_ids))[len(decode(prompt)) :]


def test_stream_is_generate_token_by_token(engine: Engine, whole: GenerationResult) -> None:
    tokens = list(engine.stream(PROMPT, max_new_tokens=60))
    assert joined(tokens) == whole.text
    assert tuple(token.token_id for token in tokens) == whole.token_ids
    assert [token.position for token in tokens] == [whole.n_prompt_tokens + i for i in range(60)]
    assert [token.finish_reason for token in tokens] == [None] * 59 + [FinishReason.LENGTH]
    assert {token.sequence for token in tokens} == {0}
    times = [token.elapsed_s for token in tokens]
    assert times == sorted(times) and times[0] > 0


def test_max_new_tokens_is_exact(engine: Engine, whole: GenerationResult) -> None:
    for n_tokens in (1, 2, 17):
        result = engine.generate(PROMPT, max_new_tokens=n_tokens)
        assert result.token_ids == whole.token_ids[:n_tokens]
        assert result.finish_reason == FinishReason.LENGTH
    assert engine.generate(PROMPT, max_new_tokens=1).generated_tokens_per_s == 0


def test_a_stop_string_ends_the_text_before_it(engine: Engine, whole: GenerationResult) -> None:
    for start, length in ((0, 1), (len(whole.text) // 2, 3), (len(whole.text) // 3, 20)):
        stop = whole.text[start : start + length]
        for stops in (stop, (stop,), ["never said", stop]):
            result = engine.generate(PROMPT, max_new_tokens=60, stop=stops)
            assert result.text == whole.text[: whole.text.index(stop)]
            assert result.finish_reason == FinishReason.STOP
            assert result.token_ids == whole.token_ids[: result.n_generated_tokens]
            assert result.n_generated_tokens < 60


def test_a_stop_string_that_is_never_complete_costs_no_text(engine: Engine, whole: GenerationResult) -> None:
    assert engine.generate(PROMPT, max_new_tokens=60, stop=whole.text[-5:] + "!?").text == whole.text


def test_a_stop_token_ends_the_text_and_has_no_text(engine: Engine, whole: GenerationResult) -> None:
    end = whole.token_ids[20]
    result = engine.generate(PROMPT, max_new_tokens=60, stop_token_ids=[end])
    assert result.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert result.finish_reason == FinishReason.STOP
    expected = engine.generate(PROMPT, max_new_tokens=max(1, whole.token_ids.index(end)))
    assert result.text == expected.text


def test_the_end_of_the_context_ends_the_text(tiny: Path, whole: GenerationResult) -> None:
    with Engine.from_pretrained(tiny, quantizer="none", context_tokens=30, threads=1) as engine:
        assert engine.context_tokens == 30
        result = engine.generate(PROMPT)
        assert result.finish_reason == FinishReason.CONTEXT
        assert result.n_prompt_tokens + result.n_generated_tokens == 30
        assert result.token_ids == whole.token_ids[: result.n_generated_tokens]
        assert engine.generate(PROMPT, max_new_tokens=10**6).finish_reason == FinishReason.CONTEXT


def test_the_end_token_ends_the_text_unless_ignored(own_tiny: Path, whole: GenerationResult) -> None:
    end = whole.token_ids[20]
    expected = whole.token_ids[: whole.token_ids.index(end) + 1]
    for named in (end, [3, end]):
        (own_tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
            result = engine.generate(PROMPT, max_new_tokens=60)
            assert (result.token_ids, result.finish_reason) == (expected, FinishReason.STOP)
            assert engine.generate(PROMPT, max_new_tokens=60, ignore_eos=True).token_ids == whole.token_ids
    (own_tiny / "generation_config.json").unlink()
    config = json.loads((own_tiny / "config.json").read_text())
    (own_tiny / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        assert engine.generate(PROMPT, max_new_tokens=60).token_ids == expected


def test_a_seed_fixes_the_text(engine: Engine) -> None:
    first = engine.generate(PROMPT, max_new_tokens=40, **SAMPLED)
    assert engine.generate(PROMPT, max_new_tokens=40, **SAMPLED).token_ids == first.token_ids
    assert engine.generate(PROMPT, max_new_tokens=12, **SAMPLED).token_ids == first.token_ids[:12]
    assert engine.generate(PROMPT, max_new_tokens=40, **SAMPLED | {"seed": 6}).token_ids != first.token_ids
    largest = [engine.generate(PROMPT, max_new_tokens=9, **SAMPLED | {"seed": 2**64 - n}).token_ids for n in (1, 2)]
    assert largest[0] != largest[1]


def test_prompts_together_get_what_each_gets_alone(engine: Engine) -> None:
    together = engine.generate(PROMPTS, max_new_tokens=30)
    for prompt, result in zip(PROMPTS, together, strict=True):
        alone = engine.generate(prompt, max_new_tokens=30)
        assert (result.text, result.token_ids, result.n_prompt_tokens) == (
            alone.text,
            alone.token_ids,
            alone.n_prompt_tokens,
        )


def test_prompts_together_may_end_at_different_times(engine: Engine) -> None:
    ends = [engine.generate(prompt, max_new_tokens=30).token_ids[5 * i + 3] for i, prompt in enumerate(PROMPTS)]
    together = engine.generate(PROMPTS, max_new_tokens=30, stop_token_ids=ends)
    assert len({result.n_generated_tokens for result in together}) > 1
    for prompt, result in zip(PROMPTS, together, strict=True):
        assert result.token_ids == engine.generate(prompt, max_new_tokens=30, stop_token_ids=ends).token_ids


def test_a_sample_depends_on_its_place_in_the_list_not_on_the_others(engine: Engine) -> None:
    first, second = engine.generate(PROMPTS[:2], max_new_tokens=20, **SAMPLED)
    assert first.token_ids == engine.generate(PROMPTS[0], max_new_tokens=20, **SAMPLED).token_ids
    assert second.token_ids == engine.generate([PROMPTS[2], PROMPTS[1]], max_new_tokens=20, **SAMPLED)[1].token_ids
    same = engine.generate([PROMPT] * 3, max_new_tokens=20, **SAMPLED)
    assert len({result.token_ids for result in same}) == 3


def test_token_ids_are_a_prompt(engine: Engine, whole: GenerationResult) -> None:
    ids = engine._tokenizer.encode(PROMPT)
    assert engine.generate(ids, max_new_tokens=60).text == whole.text
    assert joined(list(engine.stream(ids, max_new_tokens=60))) == whole.text
    assert [each.text for each in engine.generate([ids, PROMPT], max_new_tokens=60)] == [whole.text] * 2
    (alone,) = engine.generate([ids], max_new_tokens=60)
    assert alone.text == whole.text


def test_results_say_how_fast_they_came(engine: Engine, whole: GenerationResult) -> None:
    assert whole.time_to_first_token_s == whole.prompt_s and whole.tokens_per_s == whole.generated_tokens_per_s
    assert re.fullmatch(
        r"<GenerationResult '.+, 60 tokens, length, [\d.]+ tokens/s, the first after [\d.]+ s>", repr(whole)
    )
    assert repr(engine) == "<Engine LlamaForCausalLM on the CPU, nothing planned, none>" == f"{engine}"


def test_wrong_types_are_refused(engine: Engine) -> None:
    for call, words in (
        (lambda: engine.count_tokens(None), "text is None; expected a string"),  # type: ignore[arg-type]
        (lambda: engine.chat(chat_template=3), "chat_template is 3; expected a Jinja template"),  # type: ignore[arg-type]
        (lambda: engine.chat(system=3, chat_template="x"), "messages are 3; expected"),  # type: ignore[arg-type]
        (lambda: engine.chat(), "has no chat template; give one with chat_template"),
    ):
        with pytest.raises((UsageError, ModelError), match=words):
            call()


def test_a_stream_says_that_its_engine_was_closed(tiny: Path) -> None:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
        begun, waiting = engine.stream(PROMPT), engine.stream(PROMPT)
        next(begun)
    for stream in (begun, waiting):
        with pytest.raises(HeteroError, match="this engine is closed"):
            next(stream)
        assert next(stream, None) is None
    assert repr(engine) == "<Engine LlamaForCausalLM, closed>"


def test_sampling_params_are_defaults_for_the_changes(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=3)
    result = engine.generate(PROMPT, params)
    assert result.n_generated_tokens == 9
    assert result.token_ids == engine.generate(PROMPT, max_new_tokens=9, temperature=1.0, seed=3).token_ids
    assert engine.generate(PROMPT, params, max_new_tokens=4).token_ids == result.token_ids[:4]


def test_a_dictionary_is_read_whole_or_refused(engine: Engine) -> None:
    for values, expected in (
        ({"temperature": 0.8, "seed": 3}, SamplingParams(temperature=0.8, seed=3)),
        ({"do_sample": True, "top_k": 5, "repeat_penalty": 1.5}, SamplingParams(9, 1.0, 5, repeat_penalty=1.5)),
        ({"repetition_penalty": 1.5, "stop": "x"}, SamplingParams(repeat_penalty=1.5, stop=("x",))),
    ):
        changes: dict[str, Any] = {"max_new_tokens": 9}
        assert (
            engine.generate(PROMPT, values, **changes).token_ids
            == engine.generate(PROMPT, expected, **changes).token_ids
        )
    for values, words in (
        ({"temprature": 0.8}, r"'temprature' is not a sampling parameter; did you mean temperature\?"),
        ({"do_sampel": True}, r"'do_sampel' is not a sampling parameter; did you mean do_sample\?"),
        ({3: 4}, "3 is not a sampling parameter"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
    ):
        with pytest.raises(UsageError, match=words):
            engine.generate(PROMPT, values)


def test_sampling_may_be_a_hugging_face_configuration(engine: Engine) -> None:
    values: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 9}
    expected = engine.generate(PROMPT, SamplingParams(9, 0.8, 20, seed=3)).token_ids
    for sampling in (values, GenerationConfig(**values)):
        assert engine.generate(PROMPT, sampling, seed=3).token_ids == expected
        assert tuple(token.token_id for token in engine.stream(PROMPT, sampling, seed=3)) == expected
    for nonsense in (0.8, "greedy", [values]):
        with pytest.raises(UsageError, match="expected a GenerationConfig or a dict"):
            engine.generate(PROMPT, nonsense)  # type: ignore[call-overload]


# What is left behind.


def test_a_finished_text_leaves_no_memory(engine: Engine) -> None:
    engine.generate(PROMPTS, max_new_tokens=3)
    assert kv_bytes(engine) == 0


def test_an_abandoned_stream_frees_its_memory(engine: Engine, whole: GenerationResult) -> None:
    stream = engine.stream(PROMPT)
    next(stream)
    assert kv_bytes(engine) > 0
    stream.close()  # type: ignore[attr-defined]
    assert kv_bytes(engine) == 0
    for _ in itertools.islice(engine.stream(PROMPT), 3):
        pass
    assert kv_bytes(engine) == 0
    engine.stream(PROMPT)  # never begun
    assert engine.generate(PROMPT, max_new_tokens=60).token_ids == whole.token_ids


def test_streams_may_run_side_by_side(engine: Engine, whole: GenerationResult) -> None:
    begun = engine.stream(PROMPT, max_new_tokens=60)
    first = [next(begun), next(begun)]
    other = engine.generate(PROMPTS, max_new_tokens=10)
    streams = [engine.stream(prompt, max_new_tokens=10) for prompt in PROMPTS]
    for tokens, result in zip(zip(*zip(*streams, strict=True), strict=True), other, strict=True):
        assert tuple(token.token_id for token in tokens) == result.token_ids
    assert joined([*first, *begun]) == whole.text
    assert kv_bytes(engine) == 0


@pytest.mark.parametrize("n_passes", [1, 4])
def test_ctrl_c_inside_a_pass_leaves_the_engine_usable(
    engine: Engine, whole: GenerationResult, monkeypatch: pytest.MonkeyPatch, n_passes: int
) -> None:
    executor = engine.executor
    real, passes = executor._ops.attend, itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(passes) == 3 * n_passes - 1:  # three layers a pass
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(executor._ops, "attend", interrupted)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        for token in engine.stream(PROMPT):
            seen.append(token.token_id)
    assert tuple(seen) == whole.token_ids[: n_passes - 1]
    assert kv_bytes(engine) == 0
    assert engine.generate(PROMPT, max_new_tokens=60).text == whole.text


def test_an_error_between_tokens_leaves_the_engine_usable(engine: Engine, whole: GenerationResult) -> None:
    with pytest.raises(KeyboardInterrupt):
        for _ in engine.stream(PROMPT):
            raise KeyboardInterrupt
    assert engine.generate(PROMPT, max_new_tokens=60).text == whole.text  # though the traceback still holds the stream


def test_logits_that_are_no_numbers_end_the_text(own_tiny: Path) -> None:
    tensors = load_file(own_tiny / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, own_tiny / "model.safetensors")
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        with pytest.raises(HeteroError, match=r"logits at position \d+ are not finite"):
            engine.generate(PROMPT)
        assert kv_bytes(engine) == 0


def test_a_closed_engine_says_so(tiny: Path) -> None:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
        pass
    engine.close()
    for use in (
        lambda: engine.generate(PROMPT),
        lambda: engine.stream(PROMPT),
        lambda: engine.generate([PROMPT]),
        lambda: engine.context_tokens,
    ):
        with pytest.raises(HeteroError, match="closed"):
            use()


# Prompts and settings that can't be used are refused at the call, before any work.


def test_a_prompt_fills_the_context_but_for_one_token(tiny: Path) -> None:
    with Engine.from_pretrained(tiny, quantizer="none", context_tokens=40, threads=1) as engine:
        result = engine.generate(prompt_of(39, engine))
        assert (result.n_generated_tokens, result.finish_reason) == (1, FinishReason.CONTEXT)
        for call in (engine.generate, engine.stream):
            with pytest.raises(UsageError, match=r"has 40 tokens; the context limit is 40.*600"):
                call(prompt_of(40, engine))


def test_a_long_prompt_is_read_in_chunks(engine: Engine) -> None:
    result = engine.generate(prompt_of(590, engine))
    assert (result.n_prompt_tokens, result.n_generated_tokens) == (590, 10)


def test_unusable_prompts_are_refused(engine: Engine) -> None:
    for prompt, sentence in (
        ("", "empty"),
        ([], r"prompt is \[\]; expected text, a list of token ids, or a list of several\."),
        (None, r"prompt is None; expected text"),
        (3, r"prompt is 3; expected text"),
        ([PROMPT, ""], "empty"),
        ("bad \ud800 half", r"not valid Unicode at character 4"),
        ([PROMPT, 5], "prompt is 5; expected text, or a list of token ids from 0 to"),
        (b"bytes", "prompt is b'bytes'; expected text"),
        ([3, True], r"prompt is \[3, True\]; expected text, or a list of token ids"),
        ([3, 10**9], "token ids from 0 to"),
        ([[3], [-1]], r"prompt is \[-1\]; expected text"),
        ([3, "The"], "token ids from 0 to"),
    ):
        with pytest.raises(UsageError, match=sentence):
            engine.generate(prompt)  # type: ignore[call-overload]
    for prompt in ("", "\udfff", None, [PROMPT]):
        with pytest.raises(UsageError):
            engine.stream(prompt)  # type: ignore[arg-type]
    assert kv_bytes(engine) == 0


def test_unusual_prompts_are_taken(engine: Engine) -> None:
    for prompt in (" ", "\n", "\x00", "é" * 20, "👩‍👩‍👧‍👦", "שלום", "a" + "\u0301" * 50, "<s></s>"):
        assert engine.generate(prompt, max_new_tokens=2).n_generated_tokens == 2


def test_unknown_and_impossible_settings_are_refused(engine: Engine) -> None:
    for call in (engine.generate, engine.stream):
        with pytest.raises(
            UsageError, match=r"'max_tokens' is not a sampling parameter; did you mean max_new_tokens\?"
        ):
            call(PROMPT, max_tokens=5)
        with pytest.raises(UsageError, match=r"'beams' is not a sampling parameter; there are max_new_tokens, temp"):
            call(PROMPT, beams=5)
        with pytest.raises(UsageError, match="temperature is nan"):
            call(PROMPT, temperature=float("nan"))
