"""hetero-ee as its users meet it: its options, its output, and one line for everything that can go wrong."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hetero_ee import Engine, __version__
from tests.command_line import CLOSING_LINE, N_TOKENS, PLAIN, PROMPT, Cli, Ended, refused, stores

CONVERTING, COMPILING = "Converting the weights, once ...\n", "Compiling the CPU kernels, once ...\n"
MEASURING = r"Measuring this machine for about 5 seconds, [^\n]+, once \.\.\.\n"

# What is printed, and where.


def test_json_is_one_document(cli: Cli, tiny: Path, said: str) -> None:
    ended = cli("generate", PROMPT, "-m", tiny, *PLAIN, "--json", "--temp", 0, "--seed", 7, "--stop", "never said")
    document = json.loads(ended.out)
    assert ended.code == 0 and ended.out.count("\n") == 1
    assert re.fullmatch(CLOSING_LINE, ended.err)
    assert set(document) == {
        *("schema", "version", "model", "architecture", "quantizer", "sampling", "text", "token_ids", "finish_reason"),
        *("n_prompt_tokens", "n_generated_tokens", "prompt_s", "generation_s", "prompt_tokens_per_s"),
        *("generated_tokens_per_s", "peak_memory_bytes"),
        *("mode", "exit_layer", "draft_length", "gpu_layers", "plan_hash", "drafts", "exits"),
        *("bytes_per_token", "predicted_bytes_per_token", "neuron_share", "predicted_share"),
    }
    assert (document["mode"], document["plan_hash"], document["drafts"]) == ("full", None, None)
    assert (document["schema"], document["version"], document["model"]) == (2, __version__, str(tiny))
    assert (document["architecture"], document["quantizer"]) == ("LlamaForCausalLM", "none")
    assert (document["text"], document["finish_reason"]) == (said, "length")
    assert len(document["token_ids"]) == document["n_generated_tokens"] == N_TOKENS
    assert document["sampling"]["seed"] == 7 and document["sampling"]["stop"] == ["never said"]
    assert document["generation_s"] > 0 and document["peak_memory_bytes"] > 2**20


def test_options_reach_the_sampler(cli: Cli, tiny: Path) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.2}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=N_TOKENS, seed=11, **options).text
    ended = cli("generate", PROMPT, "-m", tiny, *PLAIN, "-s", 11, *flags)
    assert (ended.code, ended.out) == (0, expected)
    assert "| seed 11 ]" in ended.err
    unseeded = cli("generate", PROMPT, "-m", tiny, *PLAIN, *flags)
    seed = re.search(r"seed (\d+) \]", unseeded.err)
    assert seed and cli("generate", PROMPT, "-m", tiny, *PLAIN, *flags, "-s", seed[1]).out == unseeded.out


def test_several_stop_strings(cli: Cli, tiny: Path, said: str) -> None:
    ended = cli("generate", PROMPT, "-m", tiny, *PLAIN, "--stop", said[20:25], "--stop", said[10:12])
    assert ended.out == said[: min(said.index(said[20:25]), said.index(said[10:12]))]


def test_what_takes_long_says_so_once(
    cli: Cli, tiny: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HETERO_EE_PROFILE", "auto")
    arguments = ["generate", PROMPT, "-m", tiny, "-t", 1, "-n", 5, "--quantizer"]
    first, second = cli(*arguments, "rtn"), cli(*arguments, "rtn")
    assert first.code == second.code == 0 and first.out == second.out
    said = re.sub(r"[^\n]+: \d+%[^\n]*\n", "", first.err)  # every ten seconds
    assert re.fullmatch(re.escape(CONVERTING) + MEASURING + re.escape(COMPILING) + CLOSING_LINE, said)
    assert re.fullmatch(CLOSING_LINE, second.err)
    (store,) = stores(empty_cache)
    assert sorted(path.name for path in empty_cache.iterdir()) == ["kernels", "stores"]
    from_store = cli("generate", PROMPT, "-m", store, "-t", 1, "-n", 5)
    assert from_store.out == first.out and re.fullmatch(CLOSING_LINE, from_store.err)
    assert re.fullmatch(re.escape(CONVERTING) + CLOSING_LINE, cli(*arguments, "search").err)


def test_a_terminal_gets_a_bar_for_each_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hetero_ee_cli.terminal.progress import stage_progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with stage_progress() as progress:
        assert capsys.readouterr() == ("", "")  # nothing before there is something to tell
        for stage in ("Converting the weights", "Compiling the CPU kernels"):
            progress(stage, 1, 2)
            progress(stage, 2, 2)
    out, err = capsys.readouterr()
    assert out == "" and "Converting the weights, once" in err and "Compiling the CPU kernels, once" in err
    assert "100%" in err


def test_a_terminal_gets_a_remark_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hetero_ee_cli.terminal.progress import stage_progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with stage_progress() as progress:
        for remark in ("It is late", "It is early", "It is late"):
            progress(remark, 0, 0)
    assert capsys.readouterr().err.count("It is late.") == 1


def test_version_and_bare_call(cli: Cli) -> None:
    assert cli("--version") == Ended(0, f"{__version__}\n", "")
    bare = cli()
    assert bare.code == 0 and "generate" in bare.out and bare.err == ""
    assert cli("--help") == bare == cli("-h")


# Where the prompt comes from.


def test_a_prompt_from_a_file_or_standard_input(cli: Cli, tiny: Path, tmp_path: Path, said: str) -> None:
    file = tmp_path / "prompt.txt"
    for ending in ("", "\n", "\r\n"):
        file.write_bytes((PROMPT + ending).encode())
        assert cli("generate", "-f", file, "-m", tiny, *PLAIN).out == said
        assert cli("generate", "-", "-m", tiny, *PLAIN, stdin=(PROMPT + ending).encode()).out == said
    file.write_bytes((PROMPT + "\n\n").encode())
    assert cli("generate", "-f", file, "-m", tiny, *PLAIN).out != said  # only one newline is the file's own


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        ([], b"", "give one prompt"),
        (["-"], b"", "the prompt is empty"),
        (["-"], b"\n", "the prompt is empty"),
        ([""], b"", "the prompt is empty"),
        (["a", "-f", "FILE"], b"", "give one prompt"),
        (["-f", "FILE"], b"", "is not UTF-8 text at byte 2"),
        (["-"], b"ab\xff", "standard input is not UTF-8 text at byte 2"),
        (["-f", "no-such-file"], b"", "no-such-file can't be read (No such file or directory)"),
        (["-f", "/"], b"", "can't be read (Is a directory)"),
        (["a\udcffb"], b"", "not valid Unicode at character 1"),
        (["-"], b"x" * (64 * 2**20 + 1), "more than 64 MiB"),
        (["-"], "é".encode() * (32 * 2**20 + 1), "more than 64 MiB"),
    ],
    ids=range(12),
)
def test_unusable_prompts(
    cli: Cli, tiny: Path, tmp_path: Path, cache: Path, arguments: list[str], stdin: bytes, sentence: str
) -> None:
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    given = [str(tmp_path / "bad.txt") if argument == "FILE" else argument for argument in arguments]
    ended = cli("generate", *given, "-m", tiny, *PLAIN, stdin=stdin)
    assert refused(ended, cache) == 2
    assert sentence in ended.err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--temp", "-1"], "--temp is -1"),
        (["--temp", "nan"], "--temp is nan"),
        (["--temp", "inf"], "--temp is inf"),
        (["--temp", "hot"], "--temp"),
        (["--top-k", "-2"], "--top-k is -2"),
        (["--top-k", "1.5"], "--top-k"),
        (["--top-p", "0"], "--top-p is 0"),
        (["--top-p", "1.1"], "--top-p is 1.1"),
        (["--min-p", "2"], "--min-p is 2"),
        (["--repeat-penalty", "0"], "--repeat-penalty is 0"),
        (["--seed", "-2"], "--seed is -2"),
        (["--seed", str(2**64)], "--seed is 18446744073709551616"),
        (["-n", "0"], "-n / --max-tokens is 0; expected a whole number from 1, or -1: until the text ends."),
        (["-n", "-5"], "-n / --max-tokens is -5; expected a whole number from 1, or -1: until the text ends."),
        (["--stop", ""], "--stop is empty"),
        (
            ["--quantizer", "int3"],
            "quantizer is 'int3'; expected one of codebook, search, rtn, nf4, int5, int6,",
        ),
        (["-t", "-1"], "-t / --threads is -1"),
        (["-c", "-5"], "-c / --ctx-size is -5"),
        (["--ctx-size=-5"], "hetero-ee: --ctx-size is -5"),
        (["-t5x"], "'-t' / '--threads'"),
        (["-ngl", "few"], "-ngl / --gpu-layers is 'few'; expected a number of layers, all or auto"),
        (["-ngl99"], "there is no option -ngl99. Did you mean -ngl 99? See hetero-ee generate --help."),
        (["-ot=a=gpu", "-ngl=x"], "-ngl / --gpu-layers is 'x'"),
        (["-otx=gpu"], "Did you mean -ot x=gpu?"),
        (["--colour"], "No such option"),
        (["--model"], "--model"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_impossible_settings_are_refused_before_a_conversion(
    cli: Cli, tiny: Path, cache: Path, flags: list[str], sentence: str
) -> None:
    ended = cli("generate", PROMPT, "-m", tiny, "-t", 1, *flags)
    assert refused(ended, cache) == 2
    assert sentence in ended.err


def test_unknown_commands(cli: Cli, cache: Path) -> None:
    for arguments, command in (
        (["generat"], ""),
        (["--nonsense"], ""),
        (["generate", "one", "two"], " generate"),
        (["models", "verify", "--nonsense"], " models verify"),
    ):
        ended = cli(*arguments)
        assert refused(ended, cache) == 2
        assert f"See hetero-ee{command} --help." in ended.err


def test_a_prompt_longer_than_the_context(cli: Cli, tiny: Path, cache: Path) -> None:
    ended = cli("generate", "a story " * 50, "-m", tiny, *PLAIN, "-c", 20)
    assert refused(ended, cache) == 2
    assert re.search(r"the prompt has \d+ tokens; the context limit is 20, including", ended.err)


# Models that can't be used: one of each exit code. test_bad_models_*.py have the many ways to be bad.


def no_folder(folder: Path) -> str:
    shutil.rmtree(folder)
    return "there is no folder"


def a_file(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.write_text("model")
    return "is a file"


def malformed_config(folder: Path) -> str:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"],')
    return "not valid JSON"


def not_a_number(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return "model.layers.2.mlp.down_proj.weight holds nan at [3, 5]"


@pytest.mark.parametrize("quantizer", ["codebook", "none"])
@pytest.mark.parametrize("spoil", [no_folder, a_file, malformed_config, not_a_number], ids=lambda spoil: spoil.__name__)
def test_unusable_models(cli: Cli, own_tiny: Path, cache: Path, spoil: Callable[[Path], str], quantizer: str) -> None:
    expected = spoil(own_tiny)
    ended = cli("generate", PROMPT, "-m", own_tiny, "-t", 1, "-n", 2, "--quantizer", quantizer)
    said = Ended(ended.code, ended.out, ended.err.removeprefix(CONVERTING))
    assert refused(said, cache) == (2 if spoil in (no_folder, a_file) else 1)  # what is typed, what the folder holds
    assert expected in ended.err


def test_a_given_store_of_another_version_is_refused_and_kept(
    cli: Cli, tiny: Path, tmp_path: Path, cache: Path
) -> None:
    assert cli("generate", PROMPT, "-m", tiny, "-t", 1, "-n", 2, "--quantizer", "rtn").code == 0
    (store,) = stores(cache)
    moved = Path(shutil.move(store, tmp_path / "store"))
    manifest = json.loads((moved / "manifest.json").read_text())
    (moved / "manifest.json").write_text(json.dumps(manifest | {"version": 999}))
    ended = cli("generate", PROMPT, "-m", moved, "-t", 1)
    assert refused(ended, cache) == 1
    assert "version 999" in ended.err and "delete it and convert the model again" in ended.err
    assert json.loads((moved / "manifest.json").read_text())["version"] == 999


def test_control_characters_in_names_do_not_reach_the_terminal(
    cli: Cli, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are cut
    name = "two\nlines\x1b[31m"
    for sentence, code in (("there is no folder", 2), ("is a file", 2)):
        ended = cli("generate", PROMPT, "-m", name)
        assert refused(ended, cache) == code
        assert r"two\nlines\x1b[31m" in ended.err and sentence in ended.err
        Path(name).touch()
