"""Engine: opens a model and generates text. It wires the rooms of the house together and does no maths itself."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, overload

import torch

from hetero_ee.calibration.job import CalibrationOutcome, CalibrationRequest, calibrate
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.config import Progress, cache_folder
from hetero_ee.decoding.conversation import Conversation
from hetero_ee.decoding.full import generate
from hetero_ee.decoding.generation_defaults import default_sampling, eos_token_ids, generation_config
from hetero_ee.decoding.result import GeneratedToken, GenerationResult, collect
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending, Prompts
from hetero_ee.errors import HeteroError, ModelError, UsageError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.timeline import Span
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.opening import Opened, Placement, open_on_cpu, open_placed
from hetero_ee.runtime.placement_request import (
    FindProfile,
    PlacementRequest,
    requested_folder,
    requested_plan,
    warner,
)
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exact import generate_exact
from hetero_ee.speculation.opening import DraftKnowledge, OpenDrafting, open_drafting
from hetero_ee.speculation.statistics import DraftCounts, DraftStatistics
from hetero_ee.text.chat_template import ChatTemplate
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import UNQUANTIZED, ModelWeights, load_dense
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import INT4_QUANTIZERS
from hetero_ee.weights.store.library import model_folder, open_cached
from hetero_ee.weights.store.reader import checked_manifest, is_store, open_store
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.host.process import physical_core_count


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's files, read."""

    spec: ModelSpec
    tokenizer: Tokenizer
    sampling: SamplingParams  # the model's own defaults
    eos_token_ids: frozenset[int]
    weights: ModelWeights
    calibrations: CalibrationPlace | None  # None for fp32 weights, which have no store


class Engine:
    """A loaded model. Not for several threads at once. Use as a context manager, or call close()."""

    def __init__(
        self,
        model: _Model,
        executor: Executor,
        threads: int,
        opened: Opened | None = None,
        drafting: OpenDrafting | None = None,
    ) -> None:
        self._executor: Executor | None = executor
        self._opened, self._drafting = opened, drafting
        self._draft_counts = DraftCounts()
        self._tokenizer = model.tokenizer
        self._eos_token_ids = model.eos_token_ids
        self.default_sampling = model.sampling
        self.spec = model.spec
        self.quantizer = model.weights.quantizer
        self.threads = threads
        self.calibrations = model.calibrations
        self._conversations: weakref.WeakSet[Conversation] = weakref.WeakSet()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        quantizer: str | None = None,
        context_tokens: int = 0,
        threads: int = 0,
        plan: Plan | str | Path | None = None,
        vram_budget: int | None = None,
        profile: HardwareProfile | FindProfile | None = None,
        limits: Limits | None = None,
        emulate: bool = False,
        traces: bool = False,
        draft_head: str | Path | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Opens a model; torch is set to one thread for the whole process.

        model: a folder with a Hugging Face checkpoint or a store; the name of a store in the cache folder, or the
            beginning of only one; a Hugging Face id (org/name; downloaded at first use into the cache of
            huggingface_hub); or None for the demo model.
        revision: an id's branch, tag or commit. offline: only what is in that cache already.
        quantizer: "codebook", "search", "rtn" or "nf4" (int4; converted once, then kept in the cache folder), or "none"
            (fp32, straight from the checkpoint). None keeps the 4 bits of a checkpoint that bitsandbytes saved and is
            "codebook" for others. A store is opened as it is.
        context_tokens: longest prompt and text together, 0 for the model's own.
        threads: 0 for all physical cores.
        plan: where every part goes, a Plan or its JSON file, without limits. None makes one if a profile is given.
        vram_budget: bytes of GPU memory for that plan. limits: its other limits.
        profile: what the machine was measured to do, or a function of the model's shapes and folder that finds it.
        emulate: runs the plan on that profile's machine, emulated here: the same tokens, and times as there.
        traces: keeps in `spans` what a plan runs where and when.
        draft_head: folder of an EAGLE-1 head for this model; None takes the model folder's own.
        progress: called with (stage, done, in all) during a download, in bytes, a conversion, the kernels' first
            compilation and long prompts; with 0 in all, the stage is a remark.

        Raises ModelError, CheckpointError, StoreError, DiskFullError, UsageError or DeviceMemoryError.
        """
        _check_options(quantizer, context_tokens, threads)
        asked_plan, asked_head = requested_plan(plan), requested_folder(draft_head)
        request = PlacementRequest(asked_plan, vram_budget, profile, limits, emulate, context_tokens)
        folder = model_folder(model, cache_folder(), revision=revision, offline=offline, progress=progress)
        threads = threads or physical_core_count()
        torch.set_num_threads(1)  # what torch still computes is too small to share; the kernels have their own threads
        loaded = _load(folder, quantizer, threads, progress)
        n_tokens, warn = _context_tokens(loaded.spec, context_tokens), warner(progress)
        placement = request.placement(loaded.spec, folder, n_tokens)
        if placement is None:
            executor = open_on_cpu(loaded.spec, loaded.weights, n_tokens, threads, progress)
            executor.progress = progress
            return cls(loaded, executor, threads)
        calibration = None if loaded.calibrations is None else loaded.calibrations.find_or_warn(warn)
        knowledge = DraftKnowledge.found(calibration, asked_head, folder, loaded.spec, warn)
        statistics = knowledge.statistics(loaded.spec, placement.profile, threads, on_gpu=emulate)
        placement = replace(placement, statistics=statistics, traces=traces)
        opened = open_placed(
            loaded.spec, loaded.weights, placement, threads, time.perf_counter, warn, progress=progress
        )
        opened = replace(opened, placement=placement)
        opened.executor.progress = progress
        drafting = open_drafting(knowledge, opened, placement.profile, warn)
        return cls(loaded, opened.executor, threads, opened, drafting)

    @property
    def context_tokens(self) -> int:
        """Longest prompt and text together."""
        return self.executor.cache.max_tokens

    @property
    def plan(self) -> Plan | None:
        """What the model runs by, after any change for want of memory; None where nothing was planned."""
        if self._opened is None:
            return None
        running: Plan = getattr(self.executor, "plan", self._opened.plan)
        return running

    def memory(self) -> dict[str, int]:
        """Bytes in use by what for: the weights, mapped or in memory, and the KV cache of open sequences."""
        executor = self.executor
        return {"weights": executor.weights.n_bytes, "KV cache": executor.cache.n_bytes}

    @property
    def draft_statistics(self) -> DraftStatistics | None:
        """What drafting brought in the latest call of generate or stream, or reply of a chat; None in full mode."""
        if self._drafting is None:
            return None
        return self._draft_counts.statistics(self.spec.n_layers, self._drafting.drafting.exit_layer)

    @property
    def spans(self) -> list[Span]:
        """What ran on which device and link when, of an emulated machine or with traces; see `write_trace`."""
        return [] if self._opened is None else self._opened.spans()

    @property
    def placement(self) -> Placement | None:
        """What the plan was made from: profile, limits and statistics; None where nothing was planned."""
        return None if self._opened is None else self._opened.placement

    @property
    def drafting(self) -> Drafting | None:
        """What exact mode drafts with, for measuring it; None in full mode."""
        return None if self._drafting is None else self._drafting.drafting

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings what chat() needs."""
        return self._tokenizer.chat_template is not None

    @property
    def draft_origin(self) -> str:
        """Where drafts come from, in a few words; empty in full mode."""
        return "" if self._drafting is None else self._drafting.origin

    def stream(self, prompt: str, sampling: SamplingParams | None = None, **changes: Any) -> Iterator[GeneratedToken]:
        """Yields each token as it is generated; `changes` are SamplingParams fields to change. Raises UsageError.

        The prompt is checked at the call; closing the iterator early frees its memory.
        """
        params = self._params(sampling, changes)
        return self._tokens([self._prompt_ids(prompt)], params)

    @overload
    def generate(self, prompt: str, sampling: SamplingParams | None = None, **changes: Any) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: Sequence[str], sampling: SamplingParams | None = None, **changes: Any
    ) -> list[GenerationResult]: ...

    def generate(
        self, prompt: str | Sequence[str], sampling: SamplingParams | None = None, **changes: Any
    ) -> GenerationResult | list[GenerationResult]:
        """The whole text for one prompt, or a list of them for several, which are generated together.

        `changes` are SamplingParams fields to change, as in generate("...", temperature=0.8). Greedy, each text is the
        one its prompt gives alone; sampled, each prompt has noise of its own, by its index. Raises UsageError.
        """
        params = self._params(sampling, changes)
        texts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(texts, Sequence) or not texts:
            raise UsageError(f"a prompt is a string, or several in a list; got {shown(prompt)}.")
        prompts = [self._prompt_ids(text) for text in texts]
        tokens: list[list[GeneratedToken]] = [[] for _ in prompts]
        for token in self._tokens(prompts, params):
            tokens[token.sequence].append(token)
        results = [collect(mine) for mine in tokens]
        return results[0] if isinstance(prompt, str) else results

    def chat(
        self,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        **changes: Any,
    ) -> Conversation:
        """Starts a conversation, to be closed like the engine, or with it.

        system: what the model is told before the first message. chat_template: in place of the model's own. `changes`
        are SamplingParams fields to change. Raises UsageError, and ModelError for a model without a template.
        """
        executor, params = self.executor, self._params(sampling, changes)
        source = self._tokenizer.chat_template if chat_template is None else chat_template
        if source is None:
            raise ModelError(
                "this model has no chat template; give one with --chat-template-file (in Python: chat_template=...), "
                "or use hetero-ee generate."
            )
        template = ChatTemplate(source, self._tokenizer.special_tokens)
        sources = () if self._drafting is None else self._drafting.drafting.sources
        closing = [source.close for source in sources]
        conversation = Conversation(executor, self._tokenizer, template, self._tokens, params, system, closing)
        self._conversations.add(conversation)
        return conversation

    def calibrate(
        self, request: CalibrationRequest | None = None, progress: Progress | None = None
    ) -> CalibrationOutcome:
        """Measures and fits this model's early exits and writes the calibration beside its store.

        Takes minutes; interrupted, it is gone on with at the next call. Raises UsageError for too little text and for
        fp32 weights, ModelError for a model that writes no text of its own, StoreError and DiskFullError.
        """
        if self.calibrations is None:
            raise UsageError(f"a calibration belongs to a store, and quantizer {UNQUANTIZED} has none; leave that out.")
        executor, request = self.executor, request or CalibrationRequest()
        ending = self._ending(executor)
        return calibrate(executor, self._tokenizer, ending, self.calibrations, request, progress=progress)

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` as a prompt."""
        return len(self._tokenizer.encode(text))

    def close(self) -> None:
        """Frees the weights, ends the threads and every conversation. Closing twice does nothing."""
        for conversation in list(self._conversations):
            conversation.close()
        if self._drafting is not None:
            self._drafting.close()
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tokens(self, prompts: Prompts, params: SamplingParams) -> Iterator[GeneratedToken]:
        """In the plan's mode."""
        executor = self.executor
        common = executor, prompts, params, self._ending(executor), self._tokenizer.decode, self._clock
        if self._drafting is None:
            return generate(*common)
        self._draft_counts = DraftCounts()
        return generate_exact(*common, self._drafting.drafting, self._draft_counts)

    @property
    def _clock(self) -> Callable[[], float]:
        return time.perf_counter if self._opened is None else self._opened.clock

    def _ending(self, executor: Executor) -> Ending:
        return Ending(self._eos_token_ids, executor.cache.max_tokens)

    def _params(self, sampling: SamplingParams | None, changes: dict[str, Any]) -> SamplingParams:
        if sampling is None:
            sampling = self.default_sampling
        elif not isinstance(sampling, SamplingParams):
            sampling = SamplingParams.from_hf(sampling)
        return sampling.changed(**changes)

    def _prompt_ids(self, prompt: str) -> list[int]:
        if not isinstance(prompt, str):
            raise UsageError(f"a prompt is a string, got {type(prompt).__name__}.")
        if not prompt:
            raise UsageError("the prompt is empty; give some text to go on from.")
        ids = self._tokenizer.encode(prompt)
        if not ids:
            raise UsageError(f"the prompt {shown(prompt)} has no token this model knows; give other text.")
        if len(ids) >= self.context_tokens:
            raise UsageError(
                f"the prompt has {len(ids)} tokens and the context holds {self.context_tokens}, one of them new; "
                f"shorten it or raise the context size (this model's own is {self.spec.max_context_tokens})."
            )
        return ids

    @property
    def executor(self) -> Executor:
        """What runs the model, for measuring it. Raises HeteroError where the engine is closed."""
        if self._executor is None:
            raise HeteroError("this engine is closed; open the model again with Engine.from_pretrained.")
        return self._executor


def _check_options(quantizer: str | None, context_tokens: int, threads: int) -> None:
    choices = (*INT4_QUANTIZERS, UNQUANTIZED)
    if quantizer is not None and quantizer not in choices:
        raise UsageError(f"quantizer is {quantizer!r}; expected one of {', '.join(choices)}.")
    for name, value, largest in (("context size", context_tokens, 2**24), ("threads", threads, 1024)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
            raise UsageError(f"{name} is {value!r}; expected a whole number from 0 (automatic) to {largest}.")


def _context_tokens(spec: ModelSpec, asked: int) -> int:
    if spec.context_is_fixed and asked > spec.max_context_tokens:
        raise UsageError(f"context size {asked} is beyond the {spec.max_context_tokens} positions this model has.")
    return asked or spec.max_context_tokens


def _load(folder: Path, quantizer: str | None, threads: int, progress: Progress | None) -> _Model:
    """A store's weights as they are; a checkpoint's by `quantizer`, from the cache or made."""
    manifest = checked_manifest(folder) if is_store(folder) else None  # before anything in there is believed
    spec = read_spec(folder)
    tokenizer = Tokenizer.load(folder, spec.vocab_size)
    hf_generation = generation_config(folder)
    sampling = default_sampling(hf_generation, folder)
    calibrations = None
    if manifest is not None:
        weights, calibrations = open_store(folder, spec, manifest), CalibrationPlace(spec, folder)
    elif quantizer == UNQUANTIZED:
        weights = load_dense(Checkpoint(folder, spec))
    else:
        quantization = Quantization.of_model(folder, quantizer)
        store, weights = open_cached(folder, spec, quantization, cache_folder(), threads=threads, progress=progress)
        calibrations = CalibrationPlace(spec, store, folder, quantization)
    return _Model(spec, tokenizer, sampling, eos_token_ids(hf_generation, folder, tokenizer), weights, calibrations)
