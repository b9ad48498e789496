"""Calibration from end to end, on a random model: what it gives, that it can be resumed, and what it refuses."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch

from hetero_ee import Engine, UsageError
from hetero_ee.calibration.job import CalibrationJob, CalibrationOutcome, CalibrationRequest, calibrate
from hetero_ee.calibration.predictor_fitting import PredictorTraining
from hetero_ee.calibration.run import CalibrationSettings
from hetero_ee.calibration.stages import Chunk
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.calibration.texts import text_chunks, written_chunks
from hetero_ee.calibration.traces import trace
from hetero_ee.errors import DiskFullError, ModelError, StoreError
from hetero_ee.options.engine import EARLY_EXIT_MODES
from hetero_ee.options.engine import MIN_CALIBRATION_TOKENS as MIN_TOKENS
from hetero_ee.weights.store.calibration_files import PARTIAL_SUFFIX, RECORD_FILE
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee_profiles.reference import reference_profile
from tests.calibration_support import FailingDisk, same
from tests.emulation import LAPTOP
from tests.families import random_model, save_checkpoint

WORDS = tuple("the cat saw a big red ball and said hello to Lily , who ran home . Tom was sad but then".split())  # noqa: SIM905
SETTINGS = CalibrationSettings(
    save_every_s=0.0,
    n_selection_tokens=100,
    n_schedule_tokens=100,
    training=PredictorTraining(n_hidden=8, n_steps=20),
)


def text_of(n_words: int, seed: int = 0) -> str:
    torch.manual_seed(seed)
    return " ".join(WORDS[place] for place in torch.randint(len(WORDS), (n_words,)).tolist())


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, threads=1) as opened:
        yield opened


def job(
    engine: Engine,
    request: CalibrationRequest,
    progress: Callable[[str, int, int], None] | None = None,
    files: FileSystem | None = None,
) -> CalibrationOutcome:
    assert engine.calibrations is not None
    tokenizer, ending = engine._tokenizer, engine._ending(engine.executor)
    place = engine.calibrations
    request = replace(request, settings=SETTINGS, force=True)
    clock = lambda: 0.0  # noqa: E731  # saves at every chunk
    work = CalibrationJob(engine.executor, tokenizer, ending, place, request, progress, clock, files or FileSystem())
    return calibrate(work)


def written(engine: Engine) -> bytes:
    """The bytes on disk."""
    assert engine.calibrations is not None
    return (engine.calibrations.folder / RECORD_FILE).read_bytes()


def partial_file(engine: Engine) -> Path:
    assert engine.calibrations is not None
    folder = engine.calibrations.folder
    return folder.with_name(f"{folder.name}.partial")


def interrupting(call: int) -> Callable[[str, int, int], None]:
    """A progress that is Ctrl-C at its call-th call, counted from 0."""
    left = [call]

    def progress(stage: str, n_done: int, n_all: int) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt

    return progress


REQUESTS = {
    "text": CalibrationRequest((text_of(700), text_of(300, seed=1)), 900, "words"),
    "own": CalibrationRequest(None, 900),
}


@pytest.fixture(scope="module", params=REQUESTS)
def whole(request: pytest.FixtureRequest, engine: Engine) -> tuple[CalibrationRequest, list[bytes]]:
    """A request and what an uninterrupted run writes for it."""
    asked = REQUESTS[request.param]
    job(engine, asked)
    return asked, written(engine)


def test_it_is_found_beside_its_store_and_holds_every_exit_layer(engine: Engine) -> None:
    outcome = job(engine, REQUESTS["text"])
    assert engine.calibrations is not None
    assert outcome.folder == engine.calibrations.folder
    found = engine.calibrations.find()
    assert found is not None and same(found, outcome.calibration)
    assert [each.exit_layer for each in found.exit_layers] == list(range(1, engine.spec.n_layers))
    assert found.text.description == "words" and 700 < found.text.n_tokens <= 900
    assert sum(found.depths.histogram) == found.text.n_held_out_tokens
    statistics = found.statistics()
    assert statistics.rates_at(1).exit_rate == found.at(1).metrics.exit_rate
    assert not partial_file(engine).exists()


@pytest.mark.parametrize("call", [0, 1, 8, 13, 25])
@pytest.mark.sample(1)
def test_an_interrupted_run_resumed_gives_the_same_bytes(
    engine: Engine, whole: tuple[CalibrationRequest, list[bytes]], call: int
) -> None:
    request, expected = whole
    with pytest.raises(KeyboardInterrupt) as interrupt:
        job(engine, request, interrupting(call))
    goes_on = any("running it again resumes it" in note for note in getattr(interrupt.value, "__notes__", ()))
    assert partial_file(engine).exists() == goes_on
    job(engine, request)
    assert written(engine) == expected
    assert not partial_file(engine).exists()


@pytest.mark.sample(1)
def test_what_was_done_is_not_done_again(
    engine: Engine, whole: tuple[CalibrationRequest, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, run = [], engine.executor.run

    def counted(rows: object, hidden: object, layers: range) -> object:
        passes.append(layers)
        return run(rows, hidden, layers)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.executor, "run", counted)
    job(engine, whole[0])
    n_whole = len(passes)
    with pytest.raises(KeyboardInterrupt):
        job(engine, whole[0], interrupting(25))
    passes.clear()
    job(engine, whole[0])
    assert len(passes) < 0.7 * n_whole
    assert written(engine) == whole[1]


@pytest.mark.parametrize("damage", ["another run's", "changed", "cut short", "empty"])
@pytest.mark.sample(1)
def test_a_partial_file_that_is_not_this_runs_is_left_out(
    engine: Engine, whole: tuple[CalibrationRequest, list[bytes]], damage: str
) -> None:
    request, expected = whole
    other = CalibrationRequest((text_of(900, seed=7),), 900)
    with pytest.raises(KeyboardInterrupt):
        job(engine, other if damage == "another run's" else request, interrupting(20))
    file = partial_file(engine)
    content = file.read_bytes()
    changed = content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]
    file.write_bytes({"changed": changed, "cut short": content[:3000], "empty": b""}.get(damage, content))
    job(engine, request)
    assert written(engine) == expected


@pytest.mark.parametrize("at", [0, 3])
def test_a_full_disk_leaves_the_calibration_that_was_there(
    engine: Engine, whole: tuple[CalibrationRequest, list[bytes]], at: int
) -> None:
    with pytest.raises(DiskFullError, match="disk is full"):
        job(engine, REQUESTS["text"], files=FailingDisk("write", at))
    assert written(engine) == whole[1]
    job(engine, whole[0])
    assert written(engine) == whole[1]


def test_a_calibration_of_other_weights_is_refused(engine: Engine, stories260k: Path) -> None:
    job(engine, REQUESTS["text"])
    with Engine.from_pretrained(stories260k, threads=1) as other:
        assert engine.calibrations is not None and other.calibrations is not None
        other.calibrations.folder.mkdir()
        for file in engine.calibrations.folder.iterdir():
            (other.calibrations.folder / file.name).write_bytes(file.read_bytes())
        with pytest.raises(StoreError, match=r"made for another model.*hetero-ee calibrate"):
            other.calibrations.find()


@pytest.mark.parametrize("texts", [(), ("",), ("a b c",), (text_of(100), text_of(100))])
def test_a_text_too_short_says_how_much_is_needed(engine: Engine, texts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=rf"has \d+ tokens .* at least {MIN_TOKENS} are needed"):
        job(engine, CalibrationRequest(texts, 1000))


@pytest.mark.parametrize("n_tokens", [-1, 0, MIN_TOKENS - 1, 10**8])
def test_an_impossible_number_of_tokens_is_refused(n_tokens: int) -> None:
    with pytest.raises(UsageError, match=rf"expected a whole number from {MIN_TOKENS} to"):
        CalibrationRequest(n_tokens=n_tokens)


def test_a_model_with_one_layer_has_nothing_to_calibrate(demo: Path, tmp_path: Path) -> None:
    model = random_model("llama", vocab_size=2048, num_hidden_layers=1)
    folder = save_checkpoint(model, tmp_path / "one", tokenizer_from=demo)
    with Engine.from_pretrained(folder, threads=1) as engine, pytest.raises(ModelError, match="one layer"):
        engine.calibrate()


def test_fp32_weights_have_no_store_to_calibrate(tiny: Path) -> None:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
        assert engine.calibrations is None
        with pytest.raises(UsageError, match="belongs to a store"):
            engine.calibrate()


def test_what_is_there_is_returned_until_it_is_forced(engine: Engine) -> None:
    job(engine, REQUESTS["text"])
    before, passes, run = written(engine), [], engine.executor.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.executor, "run", lambda *rest: passes.append(1) or run(*rest))
        for asked in ({}, {"tokens": 1000}, {"texts": [text_of(900, seed=9)]}, {"force": False}):
            found = engine.calibrate(**asked)
            assert not found.is_new and found.calibration.text.description == "words" and found.date.count("-") == 2
        assert passes == [] and written(engine) == before
        again = engine.calibrate(replace(REQUESTS["text"], settings=SETTINGS), tokens=700, force=True)
    assert again.is_new and passes and written(engine) != before


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a dictionary": ({"request": {}}, "request is {}; expected CalibrationRequest"),
    "a text": ({"request": "text"}, "request is 'text'"),
    "no function": ({"progress": 3}, "progress is 3"),
    "tokens a word": ({"tokens": "many"}, "tokens is 'many'; expected a whole number from 512 to"),
    "tokens a truth": ({"tokens": True}, "tokens is True; expected"),
    "tokens a fraction": ({"tokens": 600.5}, "tokens is 600.5"),
    "too few tokens": ({"tokens": 3}, "tokens is 3; expected a whole number from 512"),
    "texts a string": ({"texts": "Once upon a time"}, "expected a list of strings"),
    "texts of numbers": ({"texts": [1, 2]}, "texts is [1, 2]; expected a list of strings"),
    "force a word": ({"force": "yes"}, "force is 'yes'; expected True or False"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_request_ends_in_one_sentence(engine: Engine, name: str) -> None:
    options, words = BAD[name]
    with pytest.raises(UsageError) as refused:
        engine.calibrate(**options)
    assert words in str(refused.value)


@pytest.mark.parametrize("change", [{"description": 3}, {"settings": {}}])
def test_a_request_of_wrong_types_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        CalibrationRequest(**change)


def test_chunks_are_the_texts_and_each_begins_as_a_prompt_does(engine: Engine) -> None:
    tokenizer, texts = engine._tokenizer, [text_of(400), text_of(400, seed=1)]
    chunks = text_chunks(tokenizer, texts, 600, engine.context_tokens)
    begin = tokenizer.encode("x")[0]
    assert {chunk[0] for chunk in chunks} == {begin}
    joined = [token for chunk in chunks for token in chunk[1:]]
    expected = [tokenizer.encode(text, with_special_tokens=False)[:300] for text in texts]
    assert joined == expected[0] + expected[1]
    assert max(map(len, chunks)) <= 256 and len(chunks) >= 16


def test_a_trace_is_what_a_single_pass_computes(engine: Engine) -> None:
    executor = engine.executor
    chunk = tuple(engine._tokenizer.encode(text_of(30)))
    found = trace(executor, chunk)
    assert len(found.normed) == engine.spec.n_layers - 1
    result = engine.generate(engine._tokenizer.decode(list(chunk)), max_new_tokens=1)
    assert int(found.tokens[-1]) == result.token_ids[0]
    assert found.final.shape == (len(chunk) - 1, engine.spec.hidden_size)
    assert not torch.equal(found.at(1), found.final)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", sorted({*EARLY_EXIT_MODES} - {"certified"}))
def test_a_mode_that_is_asked_for_runs_though_it_is_slower_and_the_warning_has_both_speeds(
    tiny: Path, engine: Engine, mode: str
) -> None:
    job(engine, CalibrationRequest(texts=[text_of(MIN_TOKENS * 2)]))
    options: Any = {"threads": 1, "profile": reference_profile(LAPTOP), "mode": mode, "gpu_layers": 0}
    said: list[str] = []
    with Engine.from_pretrained(tiny, progress=lambda text, *_: said.append(text), **options) as opened:
        assert opened.generate("the cat", max_new_tokens=4, ignore_eos=True).n_generated_tokens == 4
        assert opened.exit_statistics is not None
    warned = [each for each in said if f"Mode {mode} is expected to reach" in each and "of full mode" in each]
    assert len(warned) == (mode != "skipdecode")


@pytest.mark.parametrize(("chunk_tokens", "n_calls", "n_kept"), [(115, 1, 16), (128, 1, 16), (100, 2, 20)])
def test_the_model_writes_no_more_text_than_is_used(chunk_tokens: int, n_calls: int, n_kept: int) -> None:
    calls = list[int]()

    def write(number: int) -> list[Chunk]:
        calls.append(number)
        return [(1,) * chunk_tokens] * 16

    assert len(written_chunks(write, 2048, KeptSteps(), None)) == n_kept
    assert len(calls) == n_calls


@pytest.mark.sample(0)
def test_a_context_shorter_than_the_estimates_probe(tiny: Path) -> None:
    with Engine.from_pretrained(tiny, threads=1, context_tokens=40, profile="off") as short:
        assert short.calibrate(tokens=MIN_TOKENS, force=True, progress=lambda *_: None).is_new


@pytest.mark.sample(0)
def test_how_long_it_will_take_is_said_before_it_starts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are seconds of this process, whatever else the machine does."""
    monkeypatch.setattr("hetero_ee.calibration.job.LONG_S", 0.0)
    assert engine.calibrations is not None
    request, said = CalibrationRequest(texts=[text_of(MIN_TOKENS * 4)], force=True), list[str]()
    common = engine.executor, engine._tokenizer, engine._ending(engine.executor), engine.calibrations, request
    job(engine, request)  # compiles kernels
    outcome = calibrate(CalibrationJob(*common, lambda stage, *_: said.append(stage), process_time))
    found = re.fullmatch(r"Calibrating on [\d,]+ tokens of text takes about (\d+) s", said[0])
    assert found is not None and outcome.seconds / 4 < int(found[1]) + 0.5 < 4 * outcome.seconds
    engine.calibrations.folder.with_name(engine.calibrations.folder.name + PARTIAL_SUFFIX).touch()
    job(engine, request, lambda stage, *_: said.append(stage) if "takes" in stage else None)
    assert re.search(r"takes at most \d+ s", said[-1])
