"""`hetero-ee convert` and `hetero-ee pull`: turn a checkpoint into a store before the first generation."""

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee.errors import UsageError, shown
from hetero_ee.options.engine import AUTO
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.terminal.output import print_path, printable, say, table
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.quality.stores import Rounding
    from hetero_ee.weights.store.import_report import ImportedType

STANDARD_INPUT = "-"
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
SIZE = re.compile(rf"(\d{{1,9}}(?:\.\d+)?)\s*({'|'.join(UNITS)})?")
HEAD = ("in the file", "here", "matrices", "weights", "relative squared error")
NOT_HERE = dict.fromkeys(("activations", "context_tokens", "profile"), "nothing is run")


class Quality(StrEnum):
    """Values of --quality."""

    BEST = "best"


@with_options(without=NOT_HERE)
def convert(
    engine: ModelOptions,
    model: ModelArgument = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="New folder for the converted model. [default: the cache]")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Round each matrix for the inputs that it gets from a text: slower, better."),
    ] = False,
    quality: Annotated[
        Quality | None,
        typer.Option("--quality", help="With --calibrate: also make up for the errors of earlier matrices, slower."),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            min=4.5,
            max=8.5,
            help="Average bits per weight of the layers, with scales: more where they matter more.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="GIB",
            help="The same as a size of all weights, such as 6GiB or 700MiB, or auto: the most bits that keep the "
            "expected speed.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text for --calibrate, --bits or --size, - for standard input; repeatable. [default: the model's own]"
        ),
    ] = None,
) -> None:
    """Convert a model to 4-bit weights, and print where it is kept. If interrupted, run it again: it resumes."""
    if bits is not None and size is not None:
        raise UsageError("--bits and --size both say how large the weights are; leave one out.")
    if quality is not None and not calibrate:
        raise UsageError("--quality best is for --calibrate; add it, or leave --quality out.")
    is_rounded = calibrate or bits is not None or size is not None
    if text and not is_rounded:
        raise UsageError("--text is for --calibrate, --bits or --size; add one, or leave --text out.")
    texts = [read_text("text", None if str(file) == STANDARD_INPUT else file) for file in text or ()]
    rounding = None
    if size == AUTO:
        size, bits = None, _bits_for_this_machine(engine, model)
    if is_rounded:
        with ending_at_once():
            from hetero_ee.quality.stores import Rounding

        n_bytes = None if size is None else _bytes_of(size)
        rounding = Rounding(calibrate, quality is Quality.BEST, texts or None, bits=bits, n_bytes=n_bytes)
    _print_made(_converted(engine, model, output, rounding=rounding))


@with_options(without=NOT_HERE)
def pull(engine: ModelOptions, model: ModelArgument = None) -> None:
    """Download a model and convert it to 4-bit weights, for later. Nothing is run; prints where it is kept."""
    _print_made(_converted(engine, model, None, keeps_stores=True))


def _bits_for_this_machine(engine: ModelOptions, model: str | None) -> float:
    """Return the bits per weight that the planner chooses for this machine, and say why."""
    with ending_at_once():
        from hetero_ee.planning.reports.explanation import sized
        from hetero_ee.quality.sizes import best_size, sizes
        from hetero_ee_cli.commands.profile import profile_for

    with stage_progress() as progress:
        spec, _, folder = engine.model_spec(model, None, progress, configuration_only=True)
        found = list(sizes(spec, profile_for(spec, folder, progress)))
    chosen, reason = best_size(found)
    rows = [(f"{each.bits}", sized(each.n_bytes), f"{each.tokens_per_s:.1f}") for each in found]
    say(table([("bits", "size", "tokens/s expected"), *rows]))
    say(f"--size auto chose {chosen.bits} bits per weight, {reason}.")
    return chosen.bits


def _bytes_of(size: str) -> int:
    """Return a size in bytes. It is in GiB unless a unit follows."""
    found = SIZE.fullmatch(size.strip())
    if found is None:
        raise UsageError(
            f"--size is {shown(size)}, expected a number of GiB, one with a unit, such as 700MiB, or {AUTO}."
        )
    return int(float(found[1]) * UNITS[found[2] or "GiB"])


def _print_made(store: Path) -> None:
    """Print the store's path on standard output and, before it, the types in a GGUF file on standard error."""
    from hetero_ee.weights.store.import_report import imported_types
    from hetero_ee.weights.store.manifest import parsed_manifest

    rows = imported_types(parsed_manifest(store).source)
    if rows:
        say(table([HEAD, *map(_cells, rows)]))
    print_path(store)


def _cells(row: "ImportedType") -> tuple[str, ...]:
    loss = "0, kept as they are" if row.is_exact else f"{row.relative_squared_error:.2g}"
    return printable(row.types), printable(row.layout), str(row.n_tensors), f"{row.n_weights:,}", loss


def _converted(
    engine: ModelOptions,
    model: str | None,
    output: Path | None,
    *,
    keeps_stores: bool = False,
    rounding: "Rounding | None" = None,
) -> Path:
    """Return the store of the model. If keeps_stores is true, the model may already be a store."""
    options = engine.arguments(model)
    if options["model"] is None:
        raise UsageError("no model is named; give a Hugging Face id, or a folder with a checkpoint.")
    with ending_at_once():
        import torch

        from hetero_ee.weights.store.library import make_store
    from hetero_ee.config import cache_folder
    from hetero_ee.hub.config_file import read_spec
    from hetero_ee.runtime.kernel_cache import use_kernel_cache
    from hetero_ee.sparsity.request import SparsityRequest, check_layout
    from hetero_ee.weights.store.reader import is_store
    from hetero_ee_profiles.host.process import usable_threads

    asked = SparsityRequest.parsed(options.get("sparsity"))
    torch.set_num_threads(1)
    with stage_progress() as progress:
        folder = engine.model_folder(model, progress)
        if keeps_stores and is_store(folder):
            return folder
        if asked is not None:
            check_layout(read_spec(folder))
        use_kernel_cache(cache_folder(), progress)
        how: dict[str, Any] = {"cache": cache_folder(), "output": output, "quantizer": options["quantizer"]}
        how |= {"threads": usable_threads(options["threads"]), "progress": progress}
        if rounding is not None:
            from hetero_ee.quality.stores import make_rounded_store

            if asked is not None:
                raise UsageError("--calibrate, --bits and --size have no neuron-major FFNs; leave out --sparsity.")
            return make_rounded_store(folder, rounding, **how)
        in_rows = asked is not None and asked.first_in_rows
        return make_store(folder, neuron_major=asked is not None, first_in_rows=in_rows, **how)
