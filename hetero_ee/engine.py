"""The engine: a model that generates text. It connects the other modules and does no maths itself."""

import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Self, Unpack, overload

from hetero_ee.calibrating import CalibratingEngine
from hetero_ee.config import Progress
from hetero_ee.decoding.async_tokens import AsyncTokens
from hetero_ee.decoding.constrained.grammars import Grammars
from hetero_ee.decoding.conversation import Conversation, Messages, read_messages
from hetero_ee.decoding.logprobs import NO_LOGPROBS, TokenLogprobs
from hetero_ee.decoding.loop import Decoding, DecodingLoop
from hetero_ee.decoding.requests import Continuation, Ending, Prompts
from hetero_ee.decoding.result import GeneratedToken, GenerationResult, collect
from hetero_ee.decoding.scoring import prompt_logprobs
from hetero_ee.decoding.turns import CLOSED, NEVER, Turns
from hetero_ee.errors import HeteroError, UsageError, shown
from hetero_ee.opening import OpenModel, open_named
from hetero_ee.options.sampling import SAMPLING, ChatChanges, Sampling, SamplingChanges, SamplingParams
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.request import EngineOptions, PlanRequest
from hetero_ee.runtime.devices.timeline import Span
from hetero_ee.runtime.devices.traffic import TextTraffic
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.text_meter import TextMeter
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.modes import Modes
from hetero_ee.speculation.statistics import DraftStatistics, ExitStatistics
from hetero_ee.text.chat_prompt import chat_ids, open_template
from hetero_ee.text.prompt import Prompt, PromptList, PromptReader, listed
from hetero_ee.text.tokenizer import Tokenizer


class Engine(CalibratingEngine):
    """A loaded model. Use it as a context manager, or call close().

    Several threads or tasks may generate texts, which alternate token by token. All other methods are for one thread.
    """

    def __init__(self, model: OpenModel, progress: Progress | None = None) -> None:
        self._executor: Executor | None = model.executor
        self._opened = model.opened
        self.exits = model.exits  # settings of an early-exit mode, for measurements; None in other modes
        self._modes = Modes(model.drafting, model.exits, self._clock)
        self._meter = TextMeter(model.executor)
        self._tokenizer = model.files.tokenizer
        self._prompts = PromptReader(model.files.tokenizer, model.files.spec)
        self._eos_token_ids = model.files.eos_token_ids
        self.grammars = Grammars(self._tokenizer.as_json, model.files.spec.vocab_size, self._eos_token_ids)
        self.default_sampling = model.files.sampling
        self.spec = model.files.spec
        self.quantizer = model.files.weights.quantizer
        self._watch = model.files.weights.watch
        self._look = self._watch.look if self._watch is not None else lambda: None  # raises if the weights changed
        self.threads = model.threads
        self.calibrations, self.drafts = model.files.calibrations, model.drafts
        self._conversations: weakref.WeakSet[Conversation] = weakref.WeakSet()
        self._turns = Turns(progress)
        model.executor.progress = self._turns.tell

    @classmethod
    def from_pretrained(cls, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> Self:
        """Open a model by a plan made for this machine. Sets torch to one thread for the whole process.

        Args:
            model: A folder with a Hugging Face checkpoint or a store; the name of a store in the cache folder, or an
                unambiguous beginning of one; a Hugging Face id (org/name), or org/name:QUANTIZATION of a GGUF model,
                downloaded at first use into the cache of huggingface_hub; None for the demo model.
            revision: Branch, tag or commit of an id. offline: Use only what is in the cache already.
            quantizer: "codebook", "search", "rtn" or "nf4" (int4; converted once, then kept in the cache folder), or
                "none" (fp32, straight from the checkpoint). None keeps the codes of a quantized checkpoint (GPTQ, AWQ,
                GGUF, ...) if tiles can hold them, and is "codebook" for others. A store is opened as it is.
            sparsity: "exact" skips FFN neurons that are 0 (ReLU); a number skips that share of the neurons, the least
                important ones; "auto" skips the calibrated share, "dense" none. "predicted" works like "exact" but
                computes only the gates that a calibrated predictor expects to be active, which needs another weight
                layout; "unpredicted" uses that layout without a predictor. None: FFNs are dense.
            activations: "int8", or "int16", which products with quantized weights split into two int8 terms.
            context_tokens: Most tokens of prompt and output together. 0: the plan chooses a length that fits and
                grows it on demand, up to the model's maximum; without a plan it is that maximum.
            threads: CPU threads, at most one per processor; 0 for the fastest measured number, else all physical cores.
            profile: The machine to plan for. "auto" loads this machine's saved profile, or measures it quickly and
                saves that; "off" makes no plan, so that the CPU runs everything. Or a HardwareProfile, the name of a
                shipped one, a file with one, or a function from the model's shapes and folder to one. None: the
                setting `profile`.
            vram_budget, vram_margin: GiB of GPU memory to use, and to leave free. ram_budget: GiB of RAM to use.
            snapshot_budget: GiB of RAM for copies of state, from which changed texts continue.
            gpu_layers: Number of first layers to place whole on the GPU, if there is one.
            n_cpu_moe: Number of first layers whose experts stay in RAM. cpu_moe: Keep those of all layers there.
            override: Placements of parts whose names match: REGEX=gpu, REGEX=cpu, REGEX=stream.
            chunk_tokens: Tokens of a prompt per pass. None: what should be fastest.
            kv_type: Type of the KV cache, "fp32", "fp16" or "int8". None: "fp16", or "fp32" with quantizer "none".
            mode: "full", "exact", or an early-exit mode, see options.engine.EARLY_EXIT_MODES.
            draft_length: Tokens verified at once in exact mode, or caught up at once in an early-exit mode.
            draft_tree: Drafts of a draft head after the same token: 1 for chains, more for draft trees.
            risk: For mode "certified"; None is 0.05. exit_schedule: For mode "specee", the layers that judge a token.
            limits: All limits and pins of the plan in one object, instead of the options from vram_budget on.
            plan: A Plan or its JSON file, to run instead of making one.
            draft_head: An EAGLE draft head, 1 to 3.1, for this model: a folder, or a Hugging Face id (org/name). A head
                whose acceptance is unknown is checked when it is first opened. None uses the model folder's own.
            draft_model: A smaller model with the same vocabulary that drafts for exact mode, named like `model`. It is
                checked when it is first opened, and drafts on the GPU if the plan reserves memory there.
            emulate: Run the plan on the given profile's machine, emulated here: the same tokens, and that machine's
                times.
            traces: Record in `spans` what ran where and when.
            n_sequences: Sequences open at a time, for whose states the plan counts memory. None: 1.
            progress: Called with (stage, done, total) during a download (bytes), a conversion, a measurement, the
                kernels' first compilation, and long prompts (tokens). A total of 0 means that `stage` is a message.
                False: no progress. None: bars on a terminal and in a notebook.

        Raises:
            ModelError, CheckpointError, StoreError, DiskFullError, UsageError, DeviceMemoryError.
        """
        return cls(*open_named(model, options))

    def __repr__(self) -> str:
        if self._executor is None:
            return f"<Engine {self.spec.architecture}, closed>"
        return f"<Engine {self.plan or f'{self.spec.architecture} on the CPU, nothing planned'}, {self.quantizer}>"

    @property
    def context_tokens(self) -> int:
        """Maximum number of tokens of prompt and output together. It grows on demand, if it can."""
        return self.executor.cache.max_tokens

    @property
    def plan(self) -> Plan | None:
        """The current plan, including changes for lack of memory; None if the engine was opened without a plan."""
        if self._opened is None:
            return None
        running: Plan = getattr(self.executor, "plan", self._opened.plan)
        return running

    def memory(self) -> dict[str, int]:
        """Return the bytes of the weights, mapped or in memory, and of the KV cache."""
        executor = self.executor
        return {"weights": executor.weights.n_bytes, "KV cache": executor.cache.n_bytes}

    @property
    def draft_statistics(self) -> DraftStatistics | None:
        """Draft statistics of the latest call of generate or stream, or reply of a chat; None in full mode."""
        return self._modes.draft_statistics(self.spec.n_layers)

    @property
    def exit_statistics(self) -> ExitStatistics | None:
        """Exit statistics of the latest call or reply; None except in early-exit modes."""
        return self._modes.exit_statistics(self.spec.n_layers)

    @property
    def traffic(self) -> TextTraffic | None:
        """Bytes that the latest call or reply moved; None if the CPU runs everything without traces."""
        return self._meter.traffic(self.executor)

    @property
    def neuron_share(self) -> float | None:
        """Mean share of FFN neurons that the latest call's generated tokens used; None if FFNs are dense."""
        shares = self._meter.neuron_shares(self.executor)
        return None if shares is None else shares[0]

    @property
    def predicted_share(self) -> float | None:
        """Mean share of FFN neurons whose gate was computed in the latest call; None without a predictor."""
        shares = self._meter.neuron_shares(self.executor) if self.spec.predictor_rank else None
        return None if shares is None else shares[1]

    @property
    def spans(self) -> list[Span]:
        """Work of devices and links over time, recorded on an emulated machine or with traces; see `write_trace`."""
        return [] if self._opened is None else self._opened.spans()

    @property
    def plan_request(self) -> PlanRequest | None:
        """The profile, limits and statistics that the plan was made from; None if there is no plan."""
        return None if self._opened is None else self._opened.request

    @property
    def drafting(self) -> Drafting | None:
        """The drafting of exact mode, for measurements; None in full mode."""
        return self._modes.drafting

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def draft_origin(self) -> str:
        """Short description of where drafts come from; empty in full mode."""
        return "" if self.drafting is None else self.drafting.origin

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, **changes: Unpack[SamplingChanges]
    ) -> Generator[GeneratedToken]:
        """Yield each token as it is generated. Arguments are those of `generate`, for one prompt.

        The prompt is checked immediately. Closing the iterator early frees its memory.

        Raises:
            UsageError: if the prompt or an option is impossible.
            HeteroError: if the engine is closed meanwhile.
        """
        params = self._params(sampling, changes)
        return self._tokens([self._prompt_ids(prompt)], params)

    def astream(
        self, prompt: Prompt, sampling: Sampling | None = None, **changes: Unpack[SamplingChanges]
    ) -> AsyncTokens:
        """Yield tokens for asyncio: `async for token in engine.astream(...)`. Cancelling the task ends the request."""
        params, stop = self._params(sampling, changes), threading.Event()
        return AsyncTokens(self._tokens([self._prompt_ids(prompt)], params, stop), stop)

    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, **changes: Unpack[SamplingChanges]
    ) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: PromptList, sampling: Sampling | None = None, **changes: Unpack[SamplingChanges]
    ) -> list[GenerationResult]: ...

    def generate(
        self, prompt: Prompt | PromptList, sampling: Sampling | None = None, **changes: Unpack[SamplingChanges]
    ) -> GenerationResult | list[GenerationResult]:
        """Return the generated text for one prompt, or a list of texts for several, which are generated together.

        A greedy text does not depend on the other prompts. When sampling, each prompt has its own noise, by its index.

        Args:
            prompt: Text, or a list or array of token ids, or a list of such prompts.
            sampling: SamplingParams, a dictionary or a GenerationConfig; None for the model's own.
            changes: Sampling options to change, as in generate("...", temperature=0.8).

        Raises:
            UsageError: if a prompt or an option is impossible.
        """
        params = self._params(sampling, changes)
        given, is_one = listed(prompt)
        tokens: list[list[GeneratedToken]] = [[] for _ in given]
        for token in self._tokens([self._prompt_ids(each) for each in given], params):
            tokens[token.sequence].append(token)
        results = [collect(mine) for mine in tokens]
        return results[0] if is_one else results

    @overload
    def chat(
        self, messages: Messages, /, sampling: Sampling | None = None, **changes: Unpack[ChatChanges]
    ) -> GenerationResult: ...

    @overload
    def chat(
        self, system: str | None = None, sampling: Sampling | None = None, **changes: Unpack[ChatChanges]
    ) -> Conversation: ...

    def chat(
        self, system: str | Messages | None = None, sampling: Sampling | None = None, **changes: Unpack[ChatChanges]
    ) -> Conversation | GenerationResult:
        """Return the reply to a list of messages, or start a conversation, which ends with close() or the engine.

        Args:
            system: Instructions before a conversation's first message; or the messages to reply to: Message objects or
                dictionaries, as in [{"role": "user", "content": "Hello"}].
            changes: Sampling options to change, and chat_template: a template instead of the model's own.

        Raises:
            UsageError: if an option or a message is impossible.
            ModelError: if there is no template.
        """
        executor, chat_template = self.executor, changes.pop("chat_template", None)
        params = self._params(sampling, changes)
        template = open_template(self._tokenizer, chat_template)
        if system is not None and not isinstance(system, str):
            with closing(template):
                ids = chat_ids(template, self._tokenizer, read_messages(system))
            return self.generate(ids, params)
        way = self._tokens, self.close_sequence
        conversation = Conversation(executor, self._tokenizer, template, *way, params, system)
        self._conversations.add(conversation)
        return conversation

    def loop(self, someone_waits: Callable[[], bool] = lambda: False) -> DecodingLoop:
        """Start a decoding loop, for servers: sequences join and leave while others run.

        In full and exact mode, sequences share passes. In an early-exit mode, each sequence has passes of its own,
        since some policies decide by all sequences of a pass. For `someone_waits`, see `DecodingLoop`.
        """
        return DecodingLoop(self._decoding(), self._modes.for_servers(self.executor), someone_waits)

    def close_sequence(self, sequence: int) -> None:
        """Free a sequence of the KV cache, and the memory that drafting needs for it."""
        self.executor.cache.close(sequence)
        self._modes.close(sequence)

    def prompt_logprobs(self, kv_sequence: int, token_ids: list[int], n_top: int) -> Generator[list[TokenLogprobs]]:
        """Yield the log-probabilities of a prompt's tokens except the first, several at a time; for servers.

        Args:
            kv_sequence: An open, empty sequence of the KV cache, which then holds all tokens except the last.
        """
        prompt = Continuation(kv_sequence, token_ids)

        def watched() -> Generator[list[TokenLogprobs]]:
            self._look()
            yield from prompt_logprobs(self.executor, prompt, n_top, self._ending(self.executor))
            self._look()

        return self._turns.taking(watched())

    def logprobs(self, prompt: Prompt, n_top: int = 0) -> list[TokenLogprobs]:
        """Return the log-probability of each token of the prompt except the first, given the tokens before it.

        Args:
            n_top: Number of the likeliest tokens to return with each.
        """
        n_asked = self._params(None, {"logprobs": n_top}).logprobs or 0
        ids, kv_sequence = self._prompt_ids(prompt), self.executor.cache.open_new()
        try:
            return [each for chunk in self.prompt_logprobs(kv_sequence, ids, n_asked) for each in chunk]
        finally:
            self.close_sequence(kv_sequence)

    @property
    def is_damaged(self) -> bool:
        """Whether the weights' file was found to be overwritten. The model must then be opened again."""
        return self._watch is not None and self._watch.damage is not None

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of `text` when used as a prompt."""
        if not isinstance(text, str):
            raise UsageError(f"text is {shown(text)}; expected a string.")
        return len(self._tokenizer.encode(text))

    def close(self) -> None:
        """Free the weights, and end all threads, conversations and requests. Closing twice does nothing."""
        for conversation in list(self._conversations):
            conversation.close()
        self._turns.close()
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tokens(
        self, prompts: Prompts, params: SamplingParams, stop: threading.Event = NEVER
    ) -> Generator[GeneratedToken]:
        """Yield tokens in the plan's mode. `stop` ends the sequences, even during prefill.

        Raises HeteroError if the weights' file was changed before a sequence started or ended.
        """
        loop = DecodingLoop(self._decoding(), self._modes.new(self.executor))
        return self._turns.taking(loop.generate(prompts, params, stop, self._meter), stop)

    def _decoding(self) -> Decoding:
        executor = self.executor
        others = self._tokenizer.decode, self._clock, self._turns, self._look
        return Decoding(executor, lambda: self._ending(executor), *others)

    @property
    def _clock(self) -> Callable[[], float]:
        return time.perf_counter if self._opened is None else self._opened.clock

    def _ending(self, executor: Executor) -> Ending:
        return Ending(self._eos_token_ids, executor.cache.max_tokens, executor.grow, self.grammars.constraint)

    def _params(self, sampling: Sampling | None, changes: SamplingChanges) -> SamplingParams:
        chosen = self.default_sampling if sampling is None else SamplingParams.read(sampling)
        params = chosen.changed(**changes)
        params.require_known(self.spec.vocab_size)
        if params.logprobs is not None and self.exits is not None:
            raise UsageError(SAMPLING["logprobs"], f" is {params.logprobs}; {NO_LOGPROBS}.")
        self.grammars.constraint(params)
        return params

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return self._prompts.ids(prompt, self.executor.most_tokens)

    @property
    def executor(self) -> Executor:
        """The executor that runs the model, for measurements. Raises: HeteroError: if the engine is closed."""
        if self._executor is None:
            raise HeteroError(CLOSED)
        return self._executor
