"""Flags of the commands that plan: which model, which machine, within which limits."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee_profiles.hardware import HardwareProfile

GIB, MIB = 2**30, 2**20
Progress = Callable[[str, int, int], None]

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Hugging Face id, folder with a checkpoint, or store. [default: demo model]", metavar="[MODEL]"
    ),
]
RandomWeights = Annotated[
    str | None,
    typer.Option(help="In place of MODEL random weights of tinyllama-1.1b, llama-2-7b, llama-2-13b or llama-3-8b."),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Plan for a shipped profile by name, or a profile's JSON file. [default: this machine, measured]"
    ),
]
VramBudget = Annotated[
    float | None, typer.Option(help="GPU memory to use, in GiB. [default: what is free, less the margin]")
]
VramMargin = Annotated[int | None, typer.Option(help="GPU memory to leave free, in MiB. [default: 1024]")]
RamBudget = Annotated[float | None, typer.Option(help="Memory to use, in GiB. [default: what is free]")]
GpuLayers = Annotated[int | None, typer.Option("-ngl", "--gpu-layers", help="First layers that lie on the GPU whole.")]
Override = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", help="REGEX=gpu, cpu or stream for parts by name; may be given several times."),
]
KvType = Annotated[str | None, typer.Option(help="Keys and values as fp32, fp16 or int8. [default: fp32]")]
Mode = Annotated[str | None, typer.Option(help="full or exact. [default: what is expected to be faster]")]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-length", "--draft-tokens", help="Batch in one verification of exact mode. [default: the best]"
    ),
]


def limits_from(
    *,
    vram_budget: float | None,
    vram_margin: int | None,
    ram_budget: float | None,
    gpu_layers: int | None,
    override: list[str] | None,
    ctx_size: int | None,
    kv_type: str | None,
    mode: str | None,
    draft_length: int | None,
    threads: int | None,
) -> "Limits":
    """The flags as the planner takes them. Raises UsageError."""
    from hetero_ee.config.settings import read_settings
    from hetero_ee.planning.limits import Limits, parse_override

    settings = read_settings()
    usual = Limits()
    return Limits(
        vram_budget_bytes=_bytes_of(vram_budget, "--vram-budget"),
        vram_margin_bytes=usual.vram_margin_bytes if vram_margin is None else vram_margin * MIB,
        ram_budget_bytes=_bytes_of(ram_budget, "--ram-budget"),
        gpu_layers=gpu_layers,
        overrides=tuple(parse_override(text) for text in override or ()),
        context_tokens=settings.value("ctx_size", ctx_size),
        kv_type=kv_type or usual.kv_type,
        mode=mode,
        draft_length=draft_length,
        threads=settings.value("threads", threads),
    )


def hardware_from(name: str) -> "HardwareProfile":
    """The shipped profile of that name, or the one in that file. Raises UsageError."""
    from hetero_ee.errors import UsageError, shown
    from hetero_ee_profiles.hardware import HardwareProfile
    from hetero_ee_profiles.records import read_record
    from hetero_ee_profiles.reference import reference_names, reference_profile

    if name in reference_names():
        return reference_profile(name)
    if not re.search(r"[./\\]", name):
        raise UsageError(
            f"{shown(name)} is no shipped profile; there are {', '.join(reference_names())}, or give a file."
        )
    try:
        return read_record(HardwareProfile, Path(name).expanduser())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~name of a user who doesn't exist
        raise UsageError(f"the profile {name} can't be used ({error}); measure one with hetero-ee profile.") from error


def model_spec(
    model: str | None,
    random_weights: str | None,
    offline: bool | None,
    progress: Progress,
    *,
    configuration_only: bool = False,
) -> "tuple[ModelSpec, str, Path | None]":
    """The model's shapes, its name for people, and its folder where it has one. Raises HeteroError.

    configuration_only: nothing else of a Hugging Face id is downloaded.
    """
    from hetero_ee.config.settings import read_settings
    from hetero_ee.errors import UsageError
    from hetero_ee.hub.config_file import read_spec
    from hetero_ee.hub.model_id import model_name
    from hetero_ee.hub.resolve import resolve_model
    from hetero_ee.models.known_shapes import known_spec

    if random_weights is not None:
        if model is not None:
            raise UsageError("MODEL and --random-weights exclude each other; give one.")
        return known_spec(random_weights), f"{random_weights} (random weights)", None
    settings = read_settings()
    folder = resolve_model(
        settings.value("model", model),
        offline=settings.value("offline", offline),
        progress=progress,
        configuration_only=configuration_only,
    )
    return read_spec(folder), model_name(folder), folder


def _bytes_of(gib: float | None, flag: str) -> int | None:
    from hetero_ee.errors import UsageError

    if gib is None:
        return None
    if not 0 <= gib <= 2**20:
        raise UsageError(f"{flag} is {gib}; expected GiB from 0.")
    return int(gib * GIB)
