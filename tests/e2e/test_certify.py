"""Certifying from end to end, on a random model: what is judged, the file, resuming, and what is refused."""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.calibration.certificate_file import read_certificate, write_certificate
from hetero_ee.calibration.certify import TOKENS_A_PROMPT
from hetero_ee.calibration.job import CalibrationJob, CalibrationOutcome, CalibrationRequest, calibrate
from hetero_ee.calibration.texts import MOST_PROMPT_TOKENS, text_prompts
from hetero_ee.errors import DiskFullError, StoreError
from hetero_ee.kv.batch import Batch
from hetero_ee.speculation.exits.certificate import Certificate, levels_of
from hetero_ee.speculation.policies.exit_head import exit_heads
from hetero_ee.weights.store.calibration_files import CERTIFICATE_FILE, calibration_folder
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.library import remove_stored, stored_models
from hetero_ee.weights.store.record import checksummed, parsed_checksummed
from tests.calibration_support import FailingDisk
from tests.command_line import Cli
from tests.e2e.test_calibration import interrupting, text_of
from tests.e2e.test_calibration import job as calibration_job

N_PROMPTS = 40
REQUEST = CalibrationRequest((text_of(3000),), 600, "words", certify=True, n_prompts=N_PROMPTS)
OWN = replace(REQUEST, texts=None)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, threads=1) as opened:
        calibration_job(opened, replace(REQUEST, certify=False))
        yield opened


def job(
    engine: Engine,
    request: CalibrationRequest = REQUEST,
    progress: Callable[[str, int, int], None] | None = None,
    files: FileSystem | None = None,
) -> CalibrationOutcome:
    """The calibration is there; the certificate is made now, every group of prompts saved."""
    assert engine.calibrations is not None
    settings = replace(request.settings, save_every_s=0.0)
    request = replace(request, settings=settings)
    work = engine.executor, engine._tokenizer, engine._ending(engine.executor), engine.calibrations
    return calibrate(CalibrationJob(*work, request, progress, lambda: 0.0, files or FileSystem()))


def file_of(engine: Engine) -> Path:
    assert engine.calibrations is not None
    return engine.calibrations.folder / CERTIFICATE_FILE


def unfinished(engine: Engine) -> list[Path]:
    """What is left of this store's runs; stores of other processes' tests lie beside it."""
    folder = file_of(engine).parent
    return [*folder.parent.glob(f"{folder.name}*.partial")]


def certificate_of(engine: Engine) -> Certificate:
    """Return a new certificate: an earlier test may have left one of another request."""
    file_of(engine).unlink(missing_ok=True)
    found = job(engine).certificate
    assert found is not None
    return found


def test_every_exit_layer_judges_what_the_full_model_says(engine: Engine) -> None:
    """The slow reference: one prompt's text from generate, then each of its tokens alone, layer by layer."""
    found = certificate_of(engine)
    assert engine.calibrations is not None
    calibration = engine.calibrations.find()
    assert calibration is not None and found.exit_layers == tuple(range(1, engine.spec.n_layers))
    executor = engine.executor
    prompts = text_prompts(engine._tokenizer, REQUEST.texts or (), N_PROMPTS, engine.context_tokens, REQUEST.n_tokens)
    assert [len(prompt) for prompt in prompts] == found.prompt_lengths.tolist()
    heads = exit_heads(calibration, found.exit_layers, compiled=True)
    starts = np.append(0, found.n_tokens.astype(int).cumsum())
    for number in (0, 7, N_PROMPTS - 1):
        result = engine.generate(list(prompts[number]), max_new_tokens=TOKENS_A_PROMPT + 1)
        assert found.n_tokens[number] == len(result.token_ids) - 1
        text = [*prompts[number], *result.token_ids]
        expected, sequence = [], executor.cache.open_new()
        for place, token_id in enumerate(text[:-1]):
            hidden, judged = None, []
            for layer in range(engine.spec.n_layers - 1):
                batch = Batch((token_id,), (sequence,), (place,))
                hidden = executor.run(batch, hidden, range(layer, layer + 1))
                logits = executor.draft_logits(hidden, heads[layer + 1].end)[0]
                confidence = heads[layer + 1].judge.of_row(logits)
                right = int(logits.argmax()) == text[place + 1]
                judged.append(2 * int(levels_of(np.array([confidence]))[0]) + right)
            executor.run(batch, hidden, range(engine.spec.n_layers - 1, engine.spec.n_layers))
            if place >= len(prompts[number]):
                expected.append(judged)
        executor.cache.close(sequence)
        assert found.judgements[starts[number] : starts[number + 1]].tolist() == expected


def test_prompts_lie_behind_what_was_fitted_where_the_text_allows(engine: Engine) -> None:
    tokenizer, texts = engine._tokenizer, [text_of(2000), text_of(2000, seed=1)]
    encoded = [tokenizer.encode(text, with_special_tokens=False) for text in texts]
    prompts = text_prompts(tokenizer, texts, 20, engine.context_tokens, n_fitted=600)
    begin = tokenizer.encode("x")[0]
    for number, prompt in enumerate(prompts):
        first = 300 + number // 2 * MOST_PROMPT_TOKENS
        assert prompt[0] == begin and list(prompt[1:]) == encoded[number % 2][first:][: len(prompt) - 1]
    assert min(map(len, prompts)) >= 4 and len(set(map(len, prompts))) > 5
    from_start = text_prompts(tokenizer, texts, 20, engine.context_tokens, n_fitted=10**4)
    assert from_start[0][1:5] == tuple(encoded[0][:4])


def test_too_little_text_says_how_much_is_needed(engine: Engine) -> None:
    file_of(engine).unlink(missing_ok=True)
    with pytest.raises(UsageError, match=r"the texts make \d+ prompts to certify on, 9999 are needed; give \d+ tokens"):
        job(engine, replace(REQUEST, force=False, n_prompts=9999))
    assert unfinished(engine) == []


@pytest.mark.parametrize("request_", [REQUEST, OWN], ids=["text", "own"])
@pytest.mark.sample(0)
def test_an_interrupted_run_resumed_gives_the_same_bytes(engine: Engine, request_: CalibrationRequest) -> None:
    file_of(engine).unlink(missing_ok=True)
    job(engine, request_)
    expected = file_of(engine).read_bytes()
    for call in (1, 70, 90):
        file_of(engine).unlink()
        with pytest.raises(KeyboardInterrupt) as interrupt:
            job(engine, request_, interrupting(call))
        assert any("certif" in note or "stopped" in note for note in interrupt.value.__notes__)
        done = told_by(engine, request_)
        assert file_of(engine).read_bytes() == expected
        assert call < 90 or min(done) > 16 * TOKENS_A_PROMPT
        assert unfinished(engine) == []


def told_by(engine: Engine, request: CalibrationRequest) -> list[int]:
    """How many tokens were done, each time that was told."""
    done: list[int] = []
    job(engine, request, lambda stage, n_done, n_all: done.append(n_done) if stage == "Certifying" else None)
    return done


def test_it_says_first_how_long_it_takes(engine: Engine) -> None:
    file_of(engine).unlink(missing_ok=True)
    stages: list[tuple[str, int, int]] = []
    job(engine, REQUEST, lambda *told: stages.append(told))
    remarks = [index for index, told in enumerate(stages) if told[2] == 0 and "takes about" in told[0]]
    assert len(remarks) == 1 and remarks[0] < 10 and "40 prompts with 64 tokens each" in stages[remarks[0]][0]
    certifying = [told for told in stages if told[0] == "Certifying"]
    assert certifying[-1] == ("Certifying", N_PROMPTS * TOKENS_A_PROMPT, N_PROMPTS * TOKENS_A_PROMPT)


def test_what_is_there_is_returned_and_a_new_calibration_takes_it_away(engine: Engine) -> None:
    found = certificate_of(engine)
    written = file_of(engine).stat().st_mtime_ns
    again = job(engine, OWN).certificate
    assert again is not None and again.text == found.text and file_of(engine).stat().st_mtime_ns == written
    calibration_job(engine, replace(REQUEST, certify=False))
    assert not file_of(engine).exists()
    assert engine.calibrate(texts=REQUEST.texts, tokens=600).certificate is None


def test_a_full_disk_leaves_no_certificate_or_the_one_that_was_there(engine: Engine) -> None:
    file_of(engine).unlink(missing_ok=True)
    for at in (0, 1, 1):  # the first group of prompts saved, the second, the certificate: what is saved is not lost
        with pytest.raises(DiskFullError, match="disk is full"):
            job(engine, REQUEST, files=FailingDisk("write", at))
        assert not file_of(engine).exists()
    job(engine)
    assert file_of(engine).exists()


def test_it_is_read_as_it_was_written(engine: Engine, tmp_path: Path) -> None:
    found = certificate_of(engine)
    assert engine.calibrations is not None
    calibration = engine.calibrations.find()
    assert calibration is not None
    write_certificate(found, tmp_path)
    again = read_certificate(tmp_path, calibration, found.key)
    assert again is not None and again.exit_layers == found.exit_layers and again.text == found.text == "words"
    for name in ("prompt_lengths", "n_tokens", "judgements"):
        assert np.array_equal(getattr(again, name), getattr(found, name))
    assert again.kv_type == found.kv_type == "fp16"


def damaged(content: bytes, damage: str) -> bytes:
    arrays = parsed_checksummed(content)
    record = json.loads(arrays["record"].tobytes())
    if damage == "cut short":
        return content[:-100]
    if damage == "a bit":
        return content[:500] + bytes([content[500] ^ 1]) + content[501:]
    if damage == "empty":
        return b""
    if damage == "an array less":
        del arrays["n_tokens"]
    elif damage == "no zlib":
        arrays["judgements"] = arrays["judgements"][10:]
    elif damage == "too much":
        arrays["judgements"] = np.frombuffer(zlib.compress(bytes(10**6)), np.uint8)
    elif damage == "too little":
        arrays["judgements"] = np.frombuffer(zlib.compress(b"12"), np.uint8)
    elif damage == "more prompts":
        arrays["n_tokens"] = np.append(arrays["n_tokens"], np.array([1, 0], np.uint8))
    elif damage == "half a number":
        arrays["n_tokens"] = arrays["n_tokens"][1:]
    elif damage == "another version":
        record["version"] = 99
    elif damage == "layers":
        record["exit_layers"] = [2, 1]
    elif damage == "a name":
        record["kv_type"] = 3
    else:
        record["exit_layers"] = [1, 7]
    return checksummed(arrays | {"record": np.frombuffer(json.dumps(record).encode(), np.uint8)})


DAMAGES = ("cut short", "a bit", "empty", "an array less", "no zlib", "too much", "too little", "more prompts")
MORE_DAMAGES = ("half a number", "another version", "layers", "a name", "layers beyond")


@pytest.mark.parametrize("damage", DAMAGES + MORE_DAMAGES)
@pytest.mark.sample(1)
def test_a_damaged_file_is_one_sentence_and_made_again(engine: Engine, damage: str) -> None:
    found = certificate_of(engine)
    assert engine.calibrations is not None
    content = file_of(engine).read_bytes()
    file_of(engine).write_bytes(damaged(content, damage))
    calibration = engine.calibrations.find()
    assert calibration is not None
    with pytest.raises(StoreError) as refused:
        engine.calibrations.certificate(calibration)
    assert str(file_of(engine)) in str(refused.value) and str(refused.value).endswith("calibrate --certify again.")
    remarks: list[str] = []
    job(engine, REQUEST, lambda stage, done, n_all: remarks.append(stage) if n_all == 0 else None)
    assert remarks[0].startswith("Certifying again: the certificate") and file_of(engine).read_bytes() == content
    assert found.n_prompts == N_PROMPTS


@pytest.mark.parametrize("change", ["key", "exits_digest"])
def test_one_of_other_weights_or_exits_is_refused(engine: Engine, change: str) -> None:
    found = certificate_of(engine)
    assert engine.calibrations is not None
    calibration = engine.calibrations.find()
    assert calibration is not None
    content = file_of(engine).read_bytes()
    write_certificate(replace(found, **{change: "ef" * 32}), file_of(engine).parent)
    what = "another model or other weights" if change == "key" else "other exit maps and predictors"
    with pytest.raises(StoreError, match=f"was made for {what}; run hetero-ee calibrate --certify"):
        engine.calibrations.certificate(calibration)
    file_of(engine).write_bytes(content)


@pytest.mark.sample(0)
def test_one_of_other_activations_is_made_again(engine: Engine) -> None:
    found = certificate_of(engine)
    content = file_of(engine).read_bytes()
    write_certificate(replace(found, activation_terms=2), file_of(engine).parent)
    again = job(engine).certificate
    assert again is not None and again.activation_terms == 1 and file_of(engine).read_bytes() == content


@pytest.mark.parametrize("bad", [{"certify": 1}, {"n_prompts": 0}, {"n_prompts": True}, {"n_prompts": 10**9}])
def test_a_wrong_request_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="expected"):
        CalibrationRequest(**bad)  # type: ignore[arg-type]


@pytest.mark.sample(0)
def test_the_command_shows_what_may_exit_and_removing_the_model_takes_it_along(
    cli: Cli, tiny: Path, tmp_path: Path, cache: Path
) -> None:
    file = tmp_path / "words.txt"
    file.write_text(text_of(3000))
    arguments = ("calibrate", tiny, "--text", file, "--tokens", 600, "-t", 1, "--certify")
    short = cli(*arguments)
    assert short.code == 2 and "prompts to certify on, 1500 are needed" in short.err
    (model,) = stored_models(cache)
    folder = calibration_folder(model.path)
    assert (folder / "calibration.bin").is_file()
    (folder / CERTIFICATE_FILE).write_bytes(b"nothing")
    shown = cli("calibrate", tiny, "--show")
    assert shown.code == 1 and "is damaged" in shown.err
    remove_stored(model, cache)
    assert not folder.exists()
