"""The model of a server: turns requests into queued generations."""

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hetero_ee.engine import Engine
from hetero_ee.errors import UsageError
from hetero_ee.models.context_limit import beyond_context
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.generation import Echo, Generation
from hetero_ee.serving.grammar_checks import GrammarChecks
from hetero_ee.serving.metrics import MetricFamilies, Metrics
from hetero_ee.serving.scheduler import Scheduler, Scoring
from hetero_ee.serving.settings import ServerSettings
from hetero_ee.serving.tools.tool_format import MARKERS
from hetero_ee.text.chat_prompt import chat_prompt
from hetero_ee.text.chat_template import ChatTemplate, Message
from hetero_ee.text.prompt import Prompt, PromptReader
from hetero_ee.text.text_stream import TextStream

T = TypeVar("T")
CHAT_TEMPERATURE = 0.8  # temperature of the page for models whose files set none
MARGIN_TOKENS = 64  # by which a text may have fewer tokens than its beginning
LONG_TEXT = 2**15  # characters; encoding digits takes 0.15 s then (busy 2-core Zen 4, 2026-11-27)


class ServedModel:
    """An engine with its queue of requests. Nothing else may use the engine until `close`.

    `usual` has the default sampling of requests. `marker_ids` has the MARKERS that are special tokens.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        usual: SamplingParams | None = None,
        chat_template: str | None = None,
        families: MetricFamilies | None = None,
    ) -> None:
        """Start the queue.

        Args:
            usual: Default sampling; None for the model's own.
            chat_template: Template instead of the model's own.
            families: Metrics of the server to count in; None for new ones.

        Raises:
            HeteroError: if the template is invalid.
        """
        self.engine, self.settings = engine, settings
        self.usual = engine.default_sampling if usual is None else usual
        source = engine.tokenizer.chat_template if chat_template is None else chat_template
        self.template = source
        self._template = None if source is None else ChatTemplate(source, engine.tokenizer.special_tokens)
        self._prompts = PromptReader(engine.tokenizer, engine.spec)
        self._rendering = threading.Lock()  # the template's process is for one thread; encoding and decoding only read
        self._long_texts = ThreadPoolExecutor(1, "long-texts")
        found = {marker: engine.tokenizer.special_token_id(marker) for marker in MARKERS}
        self.marker_ids = {marker: token_id for marker, token_id in found.items() if token_id is not None}
        engine.tokenizer.encode("a")  # the first use initializes the tokenizer, before other threads decode
        self.grammars = GrammarChecks(engine.grammars)
        self.scheduler = Scheduler(engine, settings.n_slots, settings.queue_size)
        self.metrics = Metrics(settings.model_name, self.scheduler, families)
        self.scheduler.watch = self.metrics.step

    @property
    def problem(self) -> str | None:
        """Reason why all requests fail; None if the server works."""
        if not self.scheduler.is_alive:
            return "the server is shutting down"
        if self.engine.is_damaged:
            return "the weights' file was overwritten; restart the server"
        return "a grammar does not finish compiling; restart the server" if self.grammars.is_stuck else None

    @property
    def most_tokens(self) -> int:
        """Maximum context length in tokens."""
        return self.engine.executor.most_tokens

    @property
    def page_temperature(self) -> float:
        """Temperature of the page's chats unless the user changes it. Greedy chats repeat themselves."""
        given = self.settings.page_temperature
        return (self.engine.default_sampling.temperature or CHAT_TEMPERATURE) if given is None else given

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, as `Engine.generate` reads it.

        Raises:
            HeteroError: if the prompt is invalid or too long.
        """
        n_characters = len(prompt) if isinstance(prompt, str) else 0
        return self._fitting(await self._working(lambda: self._read(prompt), n_characters), "prompt")

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], str]:
        """Render a conversation and return its token ids and text.

        Args:
            tools, variables: See `ChatTemplate.render`.

        Raises:
            HeteroError: if the template refuses the messages or the prompt is too long.
        """
        text, mark = await asyncio.to_thread(self._render, messages, tools, variables)
        ids = await self._working(lambda: self._read_chat(text, mark), len(text))
        return self._fitting(ids, "messages"), text.replace(mark, "") if mark else text

    async def encode(self, text: str, *, with_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            HeteroError: if the tokenizer fails.
        """

        encode = self.engine.tokenizer.encode
        return await self._working(lambda: encode(text, with_special_tokens=with_special_tokens), len(text))

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of these tokens.

        Raises:
            RequestError: if one of them is not a token id.
        """
        n_tokens = self.engine.spec.vocab_size
        for each in token_ids:
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < n_tokens:
                raise RequestError(f"tokens contains an invalid id; expected ids from 0 to {n_tokens - 1}.", "tokens")

        return await self._working(lambda: self.engine.tokenizer.decode(token_ids), len(token_ids))

    async def token_texts(self, token_ids: Collection[int]) -> dict[int, str]:
        def work() -> dict[int, str]:
            return {each: self.engine.tokenizer.token_text(each) for each in token_ids}

        return await asyncio.to_thread(work)

    async def echo(self, prompt: Prompt, prompt_ids: list[int], scoring: Scoring | None) -> Echo:
        """Return the echo of a prompt from its token ids, which `prompt_ids` returned."""

        def work() -> Echo:
            stream, text, offsets = TextStream(self.engine.tokenizer.decode, []), "", []
            for each in prompt_ids:
                offsets.append(len(text))
                text += stream.add(each)
            return Echo(prompt if isinstance(prompt, str) else text + stream.finish(), offsets, scoring)

        return await asyncio.to_thread(work)

    def generation(
        self, prompt_ids: list[int], params: SamplingParams, echo: Echo | None = None, *, keeps_tokens: bool = False
    ) -> Generation:
        """Queue a generation and return it.

        Raises:
            BusyError: if the queue is full.
        """
        timeout_s = self.settings.request_timeout_s
        common = self.scheduler, self.metrics, prompt_ids, params, timeout_s, echo
        return Generation(*common, keeps_tokens=keeps_tokens)

    def close(self) -> None:
        """End every request. Closing twice does nothing."""
        self.scheduler.close()
        self.metrics.close()
        self.grammars.close()
        self._long_texts.shutdown(wait=False, cancel_futures=True)
        if self._template is not None:
            self._template.close()

    async def _working(self, work: Callable[[], T], n_characters: int) -> T:
        """Run `work` on a text in a thread. Long texts wait for each other, so that they never use all threads."""
        threads = None if n_characters <= LONG_TEXT else self._long_texts
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _read(self, prompt: Prompt) -> list[int]:
        try:
            if isinstance(prompt, str):
                self._refuse_by_beginning(prompt, "prompt")
            # The length is checked below, where the error has a code for programs.
            return self._prompts.ids(prompt, 2**62)
        except UsageError as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(str(error), "prompt", code="invalid_value") from error

    def _read_chat(self, text: str, mark: str) -> list[int]:
        self._refuse_by_beginning(text, "messages", mark)
        ids = self.engine.tokenizer.encode(text, with_special_tokens=False, mark=mark)
        if not ids:
            raise RequestError("the chat template turns these messages into an empty prompt.", "messages")
        return ids

    def _refuse_by_beginning(self, text: str, param: str, mark: str = "") -> None:
        """Refuse a text if its beginning already has too many tokens, before the rest is encoded."""
        n_characters = LONG_TEXT
        while n_characters < len(text):
            n_tokens = len(self.engine.tokenizer.encode(text[:n_characters], mark=mark))
            if n_tokens > self.most_tokens + MARGIN_TOKENS:
                raise self._too_long(f"more than {self.most_tokens}", param)
            n_characters *= 4

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None
    ) -> tuple[str, str]:
        if self._template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template-file.",
                "messages",
                code="no_chat_template",
            )
        with self._rendering:
            return chat_prompt(self._template, self.engine.tokenizer, messages, tools, variables)

    def _fitting(self, ids: list[int], param: str) -> list[int]:
        if len(ids) >= self.most_tokens:
            raise self._too_long(str(len(ids)), param)
        return ids

    def _too_long(self, n_tokens: str, param: str) -> RequestError:
        what, larger = f"the prompt has {n_tokens} tokens", "start the server with a larger --ctx-size"
        message = beyond_context(what, self.most_tokens, self.engine.spec, larger=larger)
        return RequestError(message, param, code="context_length_exceeded")
