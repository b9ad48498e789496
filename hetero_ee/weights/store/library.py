"""Open or make, list and remove the stores in the cache folder."""

import difflib
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hetero_ee.config import Progress
from hetero_ee.config.toml_file import expanded
from hetero_ee.errors import DamagedStoreError, ModelError, StoreError, UsageError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.model_files import require_tokenizer
from hetero_ee.hub.model_id import local_folder
from hetero_ee.hub.resolve import resolve_model
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import QUANTIZERS
from hetero_ee.weights.store.calibration_files import has_calibration, is_calibrations, remove_calibration
from hetero_ee.weights.store.conversion import WAITING, FitWith, cached_store, convert
from hetero_ee.weights.store.filesystem import FileSystem, allocated_bytes, store_errors, store_lock
from hetero_ee.weights.store.import_report import exact_share, imported_types, mean_error
from hetero_ee.weights.store.manifest import (
    VERSIONS,
    WEIGHTS_FILE,
    Manifest,
    check_size,
    matrix_bits,
    parsed_manifest,
    read_manifest,
    stored_version,
)
from hetero_ee.weights.store.names import PARTIAL_SUFFIX, REMOVED_SUFFIX, STORES_FOLDER
from hetero_ee.weights.store.reader import check_copies, is_store, open_store
from hetero_ee.weights.store.source import Source
from hetero_ee.weights.store.writer import holds_only_store_files, lacks_manifest

MADE_FIELDS = ("sha256", "format", "types")  # parts of a manifest's source that a complete store adds
MAX_NAMED = 3  # stores named in one error


class StoreState(Enum):
    """State of a store according to its manifest and small files. Only verify() reads the weights."""

    WHOLE = "whole"
    UNFINISHED = "unfinished"
    DAMAGED = "damaged"
    OTHER_VERSION = "other version"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A store as `hetero-ee models` lists it. Fields from the manifest are None if the manifest can't be read."""

    name: str
    path: Path
    state: StoreState
    model: str | None
    architecture: str | None
    quantizer: str | None
    source_format: str | None  # of the checkpoint: "safetensors", "GGUF", "GPTQ int4, groups of 128"
    exact_share: float | None  # of the matrices' weights those that are the checkpoint's to the bit; None for floats
    relative_squared_error: float | None  # mean relative squared error of the matrices; None for float weights
    bits: float | None  # per weight of the matrices, including scales
    n_bytes: int
    last_used_s: float  # since 1970, correct to about a day
    has_calibration: bool  # next to it


def open_cached(
    folder: Path,
    spec: ModelSpec,
    quantization: Quantization,
    cache: Path,
    *,
    threads: int = 1,
    progress: Progress | None = None,
    files: FileSystem | None = None,
    fit_with: FitWith | None = None,
) -> tuple[Path, ModelWeights]:
    """Open the store of the checkpoint in `folder`. Convert the checkpoint if the store is missing or damaged.

    A store counts as damaged if its bytes are wrong. One that can't be read at the moment is kept. Raises: StoreError.
    fit_with: see convert.
    """
    target = cached_store(folder, quantization, cache)

    def opened() -> ModelWeights:
        how: dict[str, Any] = {"threads": threads, "progress": progress, "files": files, "fit_with": fit_with}
        made = convert(folder, spec, target, quantization, **how)
        return open_store(made, spec)

    try:
        return target, opened()
    except DamagedStoreError:
        pass
    _remove_damaged(target, spec, files or FileSystem(), progress)
    return target, opened()


def make_store(
    folder: Path,
    *,
    cache: Path,
    output: Path | None = None,
    quantizer: str | None = None,
    neuron_major: bool = False,
    first_in_rows: bool = False,
    threads: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Convert the checkpoint in `folder` to the folder `output`, or into the cache, and return the store's folder.

    Raises:
        UsageError: For example, `output` exists already and is not this store.
        ModelError, CheckpointError: The model can't be read or is not supported.
        StoreError, DiskFullError: The store can't be written.
    """
    if quantizer not in (None, *QUANTIZERS):
        raise UsageError(
            MODEL_OPTIONS["quantizer"],
            f" is {shown(quantizer)}; a store is made by one of {', '.join(QUANTIZERS)}.",
        )
    require_checkpoint(folder)
    laid_out = {"neuron_major": neuron_major, "first_in_rows": first_in_rows}
    quantization = Quantization.of_model(folder, quantizer, **laid_out)
    return make_quantized(folder, quantization, cache=cache, output=output, threads=threads, progress=progress)


def require_checkpoint(folder: Path) -> None:
    """Check that the folder can be converted. Raises: UsageError: if it is a store. ModelError: without tokenizer."""
    if is_store(folder):
        raise UsageError(f"{folder} is already a store; there is nothing to convert.")
    require_tokenizer(folder)


def make_quantized(
    folder: Path,
    quantization: Quantization,
    *,
    cache: Path,
    output: Path | None,
    threads: int = 1,
    progress: Progress | None = None,
    fit_with: FitWith | None = None,
) -> Path:
    """Convert the checkpoint in `folder` as make_store does. fit_with: see convert."""
    spec = read_spec(folder)
    how: dict[str, Any] = {"threads": threads, "progress": progress, "fit_with": fit_with}
    if output is None:
        return open_cached(folder, spec, quantization, cache, **how)[0]
    output = expanded(str(output), "the output folder")
    if os.path.lexists(output):
        if is_store(output) and _is_made_from(output, folder, spec, quantization):
            open_store(output, spec)
            return output
        raise UsageError(f"{output} is there already, and not the store of this model; give a new folder.")
    return convert(folder, spec, output.resolve(), quantization, **how)


def _is_made_from(store: Path, folder: Path, spec: ModelSpec, quantization: Quantization) -> bool:
    manifest = read_manifest(store)
    quantizers = (manifest.quantizer, manifest.vocabulary_quantizer)
    is_alike = quantizers == (quantization.name, quantization.vocabulary)
    known = {key: value for key, value in manifest.source.items() if key not in MADE_FIELDS}
    layouts = (quantization.neuron_major, quantization.first_in_rows)
    is_alike = is_alike and (manifest.neuron_major, manifest.first_in_rows) == layouts
    return is_alike and known == Source.of(folder).provenance(spec, quantization)


def _remove_damaged(target: Path, spec: ModelSpec, files: FileSystem, progress: Progress | None) -> None:
    """Remove a damaged store so that it can be made again. Does nothing if another process has replaced it."""
    with store_lock(target, files, lambda: progress(WAITING, 0, 0) if progress else None):
        if is_store(target):
            with suppress(DamagedStoreError):
                open_store(target, spec)
                return
        with store_errors(target):
            is_ours = holds_only_store_files(target) if is_store(target) else lacks_manifest(target)
        if is_ours:
            _remove(target, files)


def stored_models(cache: Path) -> list[StoredModel]:
    """Return every store in the cache folder, complete or not, sorted by name. Raises: StoreError."""
    folder = cache / STORES_FOLDER
    try:
        found = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder} can't be read ({error}).") from error
    return [_described(path) for path in found if _is_ours(path)]


def stored_model(cache: Path, name: str) -> StoredModel:
    """Return the store called `name`, or the only one whose name starts with it. Raises: UsageError."""
    found = _named(stored_models(cache), name)
    if found is None:
        raise UsageError(f"there is no store {shown(name)} in {cache / STORES_FOLDER}; hetero-ee models lists them.")
    return found


def model_folder(model: str | Path | None, cache: Path, **hub: Any) -> Path:
    """Return a model's folder. `model` is a folder's path, a store in the cache, or what resolve_model accepts.

    A folder takes precedence, then a store's name or the unambiguous beginning of it, then a Hugging Face id. `hub` and
    errors are those of resolve_model.
    """
    if not isinstance(model, str) or not model or "/" in model or local_folder(model) is not None:
        return resolve_model(model, **hub)
    finished = [each for each in stored_models(cache) if each.state is not StoreState.UNFINISHED]
    found = _named(finished, model)
    if found is not None:
        return resolve_model(found.path, **hub)
    try:
        return resolve_model(model, **hub)
    except (ModelError, UsageError) as error:
        beginnings = {
            each.name[: len(model)]: each.name for each in finished
        }  # without the key at the end, which users don't type
        near = difflib.get_close_matches(model, beginnings, n=1)
        if near:
            known = beginnings[near[0]]
            raise type(error)(f"{error} Did you mean {known}, which hetero-ee models lists?") from error
        raise


def _named(models: list[StoredModel], name: str) -> StoredModel | None:
    """Return the store called `name`, or the only one whose name starts with it. Raises: UsageError: if several do."""
    exact = [model for model in models if model.name == name]
    found = exact or [model for model in models if name and model.name.startswith(name)]
    if len(found) > 1:
        names = ", ".join(model.name for model in found[:MAX_NAMED])
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise UsageError(
            f"{shown(name)} is the beginning of {len(found)} stores' names ({names}{more}); give more of the name."
        )
    return found[0] if found else None


def remove_stored(model: StoredModel, cache: Path, files: FileSystem | None = None) -> None:
    """Remove the store's calibration and then the store from the cache folder, at once for other processes.

    Raises:
        StoreError: it is not in the cache folder, holds files that aren't a store's, or is being written.
    """
    if model.path.parent != cache / STORES_FOLDER or not holds_only_store_files(model.path):
        raise StoreError(f"{model.path} is not in {cache}, or holds more than a store; remove it by hand.")
    target = model.path.with_name(model.path.name.removesuffix(PARTIAL_SUFFIX))

    def refuse() -> None:
        raise StoreError(f"{model.name} is being written by another process; end that first.")

    files = files or FileSystem()
    with store_lock(target, files, refuse):
        remove_calibration(model.path, files)
        _remove(model.path, files)


def _remove(folder: Path, files: FileSystem) -> None:
    """Rename the folder before removing it, because a half-removed store would look like a damaged one."""
    away = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:8]}{REMOVED_SUFFIX}")
    with store_errors(folder):
        files.rename(folder, away)
        files.sync_folder(folder.parent)
        files.remove_tree(away)


def _is_ours(path: Path) -> bool:
    try:
        return not is_calibrations(path) and (is_store(path) or holds_only_store_files(path))
    except OSError:
        return False


def _described(path: Path) -> StoredModel:
    state, manifest = _state_of(path)
    source = manifest.source if manifest else {}
    model, architecture = (str(source[name]) if name in source else None for name in ("model", "architecture"))
    n_bytes, last_used_s = 0, 0.0
    with suppress(OSError):  # another process may be removing it
        statuses = {file.name: file.stat() for file in path.iterdir()}
        n_bytes = sum(map(allocated_bytes, statuses.values()))
        last_used_s = statuses[WEIGHTS_FILE].st_atime if WEIGHTS_FILE in statuses else path.stat().st_mtime
    quantizer = manifest.quantizer if manifest else None
    source_format = _source_format(source) if manifest else None
    bits = matrix_bits(manifest) if manifest else None
    rows = imported_types(source)
    kept = exact_share(rows), mean_error(rows)
    described = state, model, architecture, quantizer, source_format, *kept, bits, n_bytes, last_used_s
    return StoredModel(path.name, path, *described, has_calibration(path))


def _source_format(source: Mapping[str, Any]) -> str:
    """Return the checkpoint's format. Neuron-major stores do not record it, so their files' names decide."""
    files = source.get("files")
    names = [str(file.get("name")) for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return str(source.get("format", "GGUF" if any(name.endswith(".gguf") for name in names) else "safetensors"))


def _state_of(path: Path) -> tuple[StoreState, Manifest | None]:
    if path.suffix in (PARTIAL_SUFFIX, REMOVED_SUFFIX):
        return StoreState.UNFINISHED, None
    manifest = None
    try:
        manifest = parsed_manifest(path)
        check_size(path, manifest)
        check_copies(path, manifest)
    except StoreError:
        is_other = stored_version(path) not in (None, *VERSIONS)
        return StoreState.OTHER_VERSION if is_other else StoreState.DAMAGED, manifest
    return StoreState.WHOLE, manifest
