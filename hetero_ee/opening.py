"""Opens a model for the engine: its files, its plan, the executor that runs it, and its drafting."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.config import Progress, cache_folder, warner
from hetero_ee.config.terminal_progress import chosen_progress
from hetero_ee.decoding.generation_defaults import GenerationDefaults
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.draft_head import resolve_draft_head
from hetero_ee.models.context_limit import check_context, warn_of_context
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import ACTIVATION_TERMS, CERTIFIED, EARLY_EXIT_MODES, MODEL_OPTIONS, UNQUANTIZED
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.problem import check_experts
from hetero_ee.planning.reports.reasons import NO_TREES
from hetero_ee.planning.request import EngineOptions, PlanRequest, check_options
from hetero_ee.planning.times.threads import fastest_threads
from hetero_ee.profiling.automatic import automatic_profile
from hetero_ee.runtime.compiling import Compilation
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.opening import Opened, open_on_cpu, open_planned
from hetero_ee.sparsity.expert_order import ExpertOrder
from hetero_ee.sparsity.request import SparsityRequest
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.early_exit import EarlyExits
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits_opening import open_exits
from hetero_ee.speculation.head_check import OPENING, HeadChecks
from hetero_ee.speculation.opening import DraftKnowledge, open_drafting
from hetero_ee.speculation.sources.draft_model_opening import DraftModel
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.model_weights import ModelWeights, as_stored, load_dense, with_terms
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import cached_store
from hetero_ee.weights.store.library import model_folder, open_cached
from hetero_ee.weights.store.reader import checked_manifest, is_store, open_store
from hetero_ee_profiles.hardware import MEASURED, HardwareProfile
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.host.memory import memory_info
from hetero_ee_profiles.host.process import capped_threads, physical_core_count, surplus_threads, usable_threads

if TYPE_CHECKING:
    from hetero_ee.sparsity.order import NeuronOrder

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Data read from a model's files."""

    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    sampling: SamplingParams  # the model's own defaults
    eos_token_ids: frozenset[int]
    weights: ModelWeights
    calibrations: CalibrationPlace | None  # None for fp32 weights, which have no store
    order: "NeuronOrder | None" = None  # order of the sparse FFNs' neurons; None unless a GPU may hold the first ones


@dataclass(frozen=True, slots=True)
class OpenModel:
    files: ModelFiles
    executor: Executor
    threads: int
    opened: Opened | None = None  # None if nothing was planned
    drafts: DraftKnowledge = field(default_factory=DraftKnowledge)  # the draft head or draft model, even if not in use
    drafting: Drafting | None = None  # None except in exact mode
    exits: EarlyExits | None = None  # None except in early-exit modes


def open_named(
    model: str | Path | None, options: EngineOptions, compilation: Compilation | None = None
) -> tuple[OpenModel, Progress | None]:
    """Open a model with the arguments of `Engine.from_pretrained`.

    Args:
        compilation: the kernels' compilation if it was started before torch was imported.

    Returns:
        The open model, and the callback that receives further progress.
    """
    check_options(options)
    quantizer, offline = options.get("quantizer"), options.get("offline", False)
    sparsity, tell = SparsityRequest.parsed(options.get("sparsity")), chosen_progress(options.get("progress"))
    draft_head = resolve_draft_head(options.get("draft_head"), offline=offline, progress=tell)
    request = PlanRequest.of({**options, "draft_head": draft_head})
    revision = options.get("revision")
    folder = model_folder(model, cache_folder(), revision=revision, offline=offline, progress=tell)
    threads = running_threads(options.get("threads", 0), tell)
    if not is_store(folder):  # before minutes of conversion
        check_experts(request.limits, read_spec(folder))
    files, draft_model = read_model(folder, quantizer, threads, tell, sparsity, compilation), None
    n_terms = ACTIVATION_TERMS[options.get("activations", MODEL_OPTIONS["activations"].default)]
    spec, weights = replace(files.spec, activation_terms=n_terms), with_terms(files.weights, n_terms)
    files = replace(files, spec=spec, weights=weights)
    if (name := request.draft_model) is not None:
        drafts = read_model(
            model_folder(name, cache_folder(), offline=offline, progress=tell), quantizer, threads, tell
        )
        draft_model = DraftModel(Path(name).name, drafts.spec, drafts.weights, drafts.tokenizer)
        draft_model.check_vocabulary(files.tokenizer, files.spec.vocab_size)
    return open_model(files, request, threads, tell, draft_model), tell


def running_threads(n_asked: int, progress: Progress | None) -> int:
    """Return the number of threads to run, and limit torch to one thread for the whole process.

    `progress` receives a notice if fewer threads run than were requested, or if some are of little use.
    """
    n_run = usable_threads(n_asked)
    if problem := capped_threads(n_asked) or surplus_threads(n_run, physical_core_count()):
        warner(progress)(problem)
    torch.set_num_threads(1)  # what torch still computes is too small to share; the kernels have their own threads
    return n_run


def read_model(
    folder: Path,
    quantizer: str | None,
    threads: int,
    progress: Progress | None,
    sparsity: SparsityRequest | None = None,
    compilation: Compilation | None = None,
) -> ModelFiles:
    """Read a model's files. A store's weights are opened as they are.

    A checkpoint's weights are converted, or opened from the cache if that was done before. Meanwhile other processes
    compile the kernels, unless they are compiled already.

    Args:
        quantizer: The quantizer for converting a checkpoint.
        sparsity: If given, FFNs are laid out neuron by neuron.
        compilation: The kernels' compilation if it has started already.

    Raises:
        HeteroError: if a file is missing or damaged, or the options do not fit the model.
    """
    if quantizer == UNQUANTIZED and not is_store(folder):
        return _read_files(folder, quantizer, threads, progress, sparsity)
    with compilation or Compilation.started(threads, progress) as compilation:  # first: reading already calls kernels
        files = _read_files(folder, quantizer, threads, progress, sparsity)
        compilation.finish(files.spec, files.weights, progress)
        return files


def _read_files(
    folder: Path, quantizer: str | None, threads: int, progress: Progress | None, sparsity: SparsityRequest | None
) -> ModelFiles:
    manifest = checked_manifest(folder) if is_store(folder) else None  # before anything in there is believed
    spec, neuron_major = read_spec(folder), sparsity is not None
    first_in_rows = sparsity is not None and sparsity.first_in_rows
    if sparsity is not None:
        sparsity.check(spec)
    tokenizer = Tokenizer.load(folder, spec.vocab_size, warner(progress))
    defaults = GenerationDefaults.read(folder)
    sampling = defaults.sampling()
    calibrations = None
    if manifest is not None:
        if neuron_major and not manifest.neuron_major:
            raise UsageError(f"{folder} is a store without neuron-major FFNs; give the checkpoint it was made from.")
        if first_in_rows and not manifest.first_in_rows:
            raise UsageError(f"{folder} is a store that has no rows to predict; give the checkpoint it was made from.")
        weights, calibrations = open_store(folder, spec, manifest), CalibrationPlace(spec, folder)
    elif quantizer == UNQUANTIZED:
        if neuron_major:
            raise UsageError(MODEL_OPTIONS["quantizer"], f" {UNQUANTIZED} has no sparse FFNs; leave out one of both.")
        weights = load_dense(open_checkpoint(folder, spec))
    else:
        quantization = Quantization.of_model(folder, quantizer, neuron_major=neuron_major, first_in_rows=first_in_rows)
        if sparsity is not None:
            from hetero_ee.sparsity.applied import require_calibration

            require_calibration(cached_store(folder, quantization, cache_folder()), sparsity)
        store, weights = open_cached(folder, spec, quantization, cache_folder(), threads=threads, progress=progress)
        calibrations = CalibrationPlace(spec, store, folder, quantization)
    defaults.warn_of_ignored(spec.max_context_tokens, warner(progress))
    spec = as_stored(spec, weights)
    order = None
    if sparsity is not None and calibrations is not None:
        from hetero_ee.sparsity.applied import made_sparse
        from hetero_ee.sparsity.job import order_or_warn

        spec, weights = made_sparse(spec, weights, calibrations, sparsity)
        order = None if sparsity.is_dense else order_or_warn(calibrations, warner(progress))
    end_ids = defaults.eos_token_ids(tokenizer)
    return ModelFiles(folder, spec, tokenizer, sampling, end_ids, weights, calibrations, order)


def open_model(
    files: ModelFiles,
    request: PlanRequest,
    threads: int,
    progress: Progress | None,
    draft_model: DraftModel | None = None,
) -> OpenModel:
    """Open a model with a plan. Without a plan, the CPU runs everything.

    If the caller requested no plan and none can be made or opened, `progress` receives a notice.

    Raises:
        UsageError, ModelError, StoreError, DeviceMemoryError: if the request can't be met.
    """
    warn = warner(progress)
    check_context(files.spec, request.context_tokens)
    warn_of_context(files.spec, request.planned_context_tokens, warn)
    n_tokens = request.context_tokens or files.spec.max_context_tokens
    if request.needs_plan:
        model = _placed(files, request, threads, progress, draft_model)
    elif files.weights.quantizer == UNQUANTIZED:  # profiles are of int4 weights
        model = None
    else:
        try:
            model = _placed(files, request, threads, progress)
        except HeteroError as error:
            model, problem = None, str(error).removesuffix(".")
            warn(f"No plan could be made or opened, so the CPU runs everything: {problem}")
    if model is None:
        executor = open_on_cpu(files.spec, files.weights, n_tokens, threads, progress)
        drafts = DraftKnowledge.found(None, request.draft_head, files.folder, files.spec, warn)
        model = OpenModel(files, executor, threads, drafts=drafts)
    return model


def _placed(
    files: ModelFiles,
    request: PlanRequest,
    threads: int,
    progress: Progress | None,
    draft_model: DraftModel | None = None,
) -> OpenModel | None:
    """Open the model with a plan. Return None if there is no profile to make a plan from."""

    def automatic(spec: ModelSpec, folder: Path) -> HardwareProfile | None:
        return automatic_profile(spec, folder, threads, progress, measures=request.plan is None)

    spec, warn = files.spec, warner(progress)
    profile = request.found_profile(spec, files.folder, automatic)
    if profile is None and request.plan is None:
        return None
    if request.chooses_threads and profile is not None and _is_of_this_machine(profile):
        threads = usable_threads(fastest_threads(spec, profile))
    calibration = _calibration(files, request.mode, warn)
    popularity = None if calibration is None else ExpertOrder.of(spec, calibration.routes)
    if popularity is not None:
        files = replace(files, spec=replace(spec, independent_tokens=popularity.independent_tokens))
    for order in (files.order, popularity):
        if order is not None and (profile is None or profile.gpu is not None):  # a plan may divide FFNs by it
            files = _in_order(files, order, warn)
    spec = files.spec
    if draft_model is not None:
        knowledge = DraftKnowledge(calibration, draft_model=draft_model, is_asked=True)
    else:
        knowledge = DraftKnowledge.found(calibration, request.draft_head, files.folder, spec, warn)
    if request.mode == CERTIFIED and calibration is not None and files.calibrations is not None:
        knowledge = replace(knowledge, certificate=files.calibrations.certificate(calibration))
    checks = HeadChecks(cache_folder(), files.folder, spec, files.weights.quantizer, warn)
    knowledge = checks.known(knowledge)

    def by_knowledge(knowledge: DraftKnowledge, *, to_check: bool = False) -> Opened:
        statistics = knowledge.statistics(spec, profile, threads, request.risk, request.limits.exit_schedule)
        completed = request.completed(profile, files.weights.quantizer, statistics)
        if to_check and completed.plan is None:  # the check needs no drafts
            completed = replace(completed, limits=replace(completed.limits, mode="full"))
        opened = open_planned(spec, files.weights, completed, threads, time.perf_counter, warn, progress=progress)
        return replace(opened, request=completed)

    is_unchecked = checks.is_missing(knowledge, request.mode)
    opened = by_knowledge(knowledge, to_check=is_unchecked)
    try:
        if is_unchecked:
            knowledge = checks.checked(knowledge, opened.executor, files.tokenizer.encode(OPENING))
            opened.executor.close()
            opened = by_knowledge(knowledge)
        if NO_TREES in opened.plan.reasons:
            warn(NO_TREES)
        drafting = open_drafting(knowledge, opened, profile, warn)
        exits = open_exits(knowledge, opened, warn)
    except BaseException:
        opened.executor.close()
        raise
    return OpenModel(files, opened.executor, threads, opened, knowledge, drafting, exits)


def _is_of_this_machine(profile: HardwareProfile) -> bool:
    return profile.kind == MEASURED and profile.machine.n_cores == physical_core_count()


def _in_order(files: ModelFiles, order: "NeuronOrder | ExpertOrder", warn: Warn) -> ModelFiles:
    """Return the files with the FFNs copied so that the most active neurons, or the most popular experts, come first.

    FFNs stay unchanged if the copy does not fit in RAM, since a copy can't be read from the disk during inference.
    """
    n_bytes, available_bytes = files.weights.n_bytes, memory_info(this_host()).available_bytes
    if n_bytes > available_bytes:
        warn(
            "FFNs are not divided into hot and cold neurons or experts: the model takes "
            f"{n_bytes / 2**30:.2f} GiB of RAM and {available_bytes / 2**30:.2f} GiB are available."
        )
        return files
    spec, weights = order.applied(files.spec, files.weights)
    return replace(files, spec=spec, weights=weights)


def _calibration(files: ModelFiles, mode: str | None, warn: Warn) -> Calibration | None:
    """Return the calibration of the model's exits, or None if there isn't one.

    An unusable calibration leads to a notice, except in modes that need it.

    Raises:
        StoreError: if the mode needs a calibration that can't be used.
    """
    if files.calibrations is None:
        return None
    return files.calibrations.find() if mode in EARLY_EXIT_MODES else files.calibrations.find_or_warn(warn)
