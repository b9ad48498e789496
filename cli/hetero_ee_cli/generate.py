"""`hetero-ee generate`: a prompt in, text out as it is generated."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GeneratedToken, GenerationResult
    from hetero_ee.engine import Engine

MAX_PROMPT_BYTES = 64 * 2**20
JSON_SCHEMA = 1


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to go on from; - reads it from standard input.")] = None,
    model: Annotated[
        Path | None,
        typer.Option("-m", "--model", help="Folder with a Hugging Face checkpoint, or a store. [default: demo model]"),
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Read the prompt from a file.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("-n", "--max-new-tokens", help="Tokens to generate. [default: the model's own, else to the end]"),
    ] = None,
    temp: Annotated[
        float | None, typer.Option("--temp", "--temperature", help="0 is greedy. [default: the model's own, else 0]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's.")] = None,
    repeat_penalty: Annotated[
        float | None, typer.Option(help="Above 1, tokens already there become less likely.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("-s", "--seed", help="Same seed, same text. [default: drawn anew]")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; may be given several times.")
    ] = None,
    threads: Annotated[int, typer.Option("-t", "--threads", help="CPU threads; 0 uses every physical core.")] = 0,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", help="Longest prompt and text, in tokens; 0 is the model's own.")
    ] = 0,
    quantizer: Annotated[
        str, typer.Option(help="codebook, search or rtn (int4, converted once), or none (fp32).")
    ] = "codebook",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document at the end instead of the text.")
    ] = False,
) -> None:
    """Generate text. Only the text goes to standard output; progress and one closing line go to standard error."""
    text = read_prompt(prompt, file)
    chosen: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temp,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "seed": _new_seed() if seed is None else seed,
        "stop": tuple(stop) if stop else None,
    }
    changes = {name: value for name, value in chosen.items() if value is not None}

    options = {"quantizer": quantizer, "context_tokens": ctx_size, "threads": threads}
    _generate(text, model, options, changes, as_json)


def _generate(text: str, model: Path | None, options: dict[str, Any], changes: dict[str, Any], as_json: bool) -> None:
    """Opens the model, prints the text as it comes, then the closing line."""
    with ending_at_once():
        from hetero_ee.decoding.sampling import SamplingParams
        from hetero_ee.engine import Engine
    from hetero_ee_cli.progress import stage_progress

    SamplingParams(**changes)  # refuses impossible values now, not after a conversion
    with (
        stage_progress() as progress,
        Engine.from_pretrained(model, progress=progress, **options) as engine,
    ):
        tokens = engine.stream(text, **changes)
        result, interrupted = _run(tokens, quiet=as_json)
        if as_json:
            print(json.dumps(_document(engine, model, changes, result, interrupted)))
        if result is not None:
            _print_closing_line(result, engine, changes)
        if interrupted:
            raise KeyboardInterrupt


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or standard input. Of the last two, one ending newline is dropped."""
    from hetero_ee.errors import UsageError

    if (prompt is None) == (file is None):
        raise UsageError("give one prompt: as an argument, with --file, or - to read standard input.")
    text = _text_of(file) if prompt is None or prompt == "-" else prompt
    if not text:
        raise UsageError("the prompt is empty; give some text to go on from.")
    return text


def _text_of(file: Path | None) -> str:
    """The file's text, or standard input's where there is none."""
    from hetero_ee.errors import UsageError

    source = file or "standard input"
    try:
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1) if file is None else _read_file(file)
    except OSError as error:
        raise UsageError(f"the prompt from {source} can't be read ({error.strerror}).") from error
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt from {source} has more than {MAX_PROMPT_BYTES // 2**20} MiB.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt from {source} is not UTF-8 text at byte {error.start}.") from error
    return text.removesuffix("\n").removesuffix("\r")


def _read_file(file: Path) -> bytes:
    with file.open("rb") as source:
        return source.read(MAX_PROMPT_BYTES + 1)


def _new_seed() -> int:
    return time.time_ns() % 2**32


def _run(tokens: "Iterator[GeneratedToken]", quiet: bool) -> "tuple[GenerationResult | None, bool]":
    """Prints the text as it comes; the result so far, None where no token came, and whether Ctrl-C ended it."""
    from hetero_ee.engine import collect

    sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="")  # type: ignore[union-attr]
    seen: list[GeneratedToken] = []
    interrupted = False
    try:
        for token in tokens:
            seen.append(token)
            if token.text and not quiet:
                sys.stdout.write(token.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    return (collect(seen) if seen else None), interrupted


def _print_closing_line(result: "GenerationResult", engine: "Engine", changes: dict[str, Any]) -> None:
    from hetero_ee_profiles.process import peak_memory_bytes

    parts = [
        f"prompt {result.n_prompt_tokens} tok, {result.prompt_tokens_per_s:.1f} t/s",
        f"gen {result.n_generated_tokens} tok, {result.generated_tokens_per_s:.1f} t/s",
        f"peak memory {peak_memory_bytes() / 2**30:.2f} GiB",
    ]
    if changes.get("temperature", engine.default_sampling.temperature):
        parts.append(f"seed {changes['seed']}")
    lead = "\n\n" if sys.stdout.isatty() else ""  # the text itself ends where the model ended it
    print(f"{lead}[ {' | '.join(parts)} ]", file=sys.stderr)


def _document(
    engine: "Engine",
    model: Path | None,
    changes: dict[str, Any],
    result: "GenerationResult | None",
    interrupted: bool,
) -> dict[str, Any]:
    from dataclasses import asdict

    from hetero_ee import __version__
    from hetero_ee_profiles.process import peak_memory_bytes

    return {
        "schema": JSON_SCHEMA,
        "version": __version__,
        "model": str(model) if model else "demo",
        "architecture": engine.spec.architecture,
        "quantizer": engine.quantizer,
        "sampling": asdict(engine.default_sampling.changed(**changes)),
        "text": result.text if result else "",
        "token_ids": list(result.token_ids) if result else [],
        "finish_reason": "interrupted" if interrupted or result is None else result.finish_reason.value,
        "n_prompt_tokens": result.n_prompt_tokens if result else 0,
        "n_generated_tokens": result.n_generated_tokens if result else 0,
        "prompt_s": result.prompt_s if result else 0.0,
        "generation_s": result.generation_s if result else 0.0,
        "prompt_tokens_per_s": result.prompt_tokens_per_s if result else 0.0,
        "generated_tokens_per_s": result.generated_tokens_per_s if result else 0.0,
        "peak_memory_bytes": peak_memory_bytes(),
    }
