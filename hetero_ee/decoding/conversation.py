"""A conversation with a model: messages and replies in one sequence of the KV cache.

Every turn renders and encodes the whole conversation, and computes only what follows the longest prefix that is already
in the cache. So its token ids are those of a fresh run over the whole text, whatever was changed or interrupted before.
The reply is the same as well, since a token's bits depend only on its own sequence.
"""

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Self, Unpack

from hetero_ee.decoding.channels import answer, channel_ids, with_thoughts
from hetero_ee.decoding.requests import Continuation, common_length, room_for_reply
from hetero_ee.decoding.result import GeneratedToken, GenerationResult, collect
from hetero_ee.errors import HeteroError, UsageError, shown
from hetero_ee.models.context_limit import beyond_context
from hetero_ee.options.sampling import SamplingChanges, SamplingParams
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.text.chat_prompt import chat_ids
from hetero_ee.text.chat_template import MAX_MESSAGE_CHARACTERS, ChatTemplate, Message
from hetero_ee.text.tokenizer import Tokenizer

N_SEEDS = 2**64
ROLES = ("system", "user", "assistant")  # roles that messages given as dictionaries may have
Messages = Sequence[Message | Mapping[str, str]]
Generate = Callable[[Continuation, SamplingParams], Iterator[GeneratedToken]]


class Reply(Iterator[GeneratedToken]):
    """Iterator over the tokens of one reply. Nothing is computed before the first token is requested.

    sampling: the parameters it is generated with. n_prompt_tokens: tokens of the conversation before the reply.
    n_cached_tokens: how many of these the KV cache already held. n_forgotten_messages: number of oldest messages that
    were dropped because the context is full.
    """

    def __init__(
        self,
        tokens: Generator[GeneratedToken],
        sampling: SamplingParams,
        n_prompt_tokens: int,
        n_cached_tokens: int,
        n_forgotten_messages: int,
    ) -> None:
        self._tokens, self._seen = tokens, list[GeneratedToken]()
        self.sampling = sampling
        self.n_prompt_tokens = n_prompt_tokens
        self.n_cached_tokens = n_cached_tokens
        self.n_forgotten_messages = n_forgotten_messages

    @property
    def n_prefilled_tokens(self) -> int:
        """Tokens of the conversation before the reply that prefill had to compute."""
        return self.n_prompt_tokens - self.n_cached_tokens

    @property
    def result(self) -> GenerationResult | None:
        """Result of the reply so far, or None before the first token."""
        return collect(self._seen, self.n_cached_tokens) if self._seen else None

    def finish(self) -> GenerationResult:
        """Generate the rest and return the whole reply. Raises HeteroError if it was ended before its first token."""
        for _ in self:
            pass
        if self.result is None:
            raise HeteroError("this reply was ended before its first token; send the message again.")
        return self.result

    def close(self) -> None:
        """End the reply after the tokens so far."""
        self._tokens.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GeneratedToken:
        token = next(self._tokens)
        self._seen.append(token)
        return token


class Conversation:
    """Messages of a conversation and their KV cache. Use it as a context manager, or call close() to free the cache.

    A turn is the user's message and its reply. It becomes part of the conversation with the reply's first token: a turn
    that fails earlier leaves no trace, and one that is interrupted later keeps the tokens so far. Each turn must leave
    room for a reply (a quarter of the context, or max_new_tokens if that is less). If a turn does not fit and the
    context can't grow, the oldest turns are forgotten for good. This frees another quarter if possible, so that the
    next turns find their prefix in the cache. The system message stays. Only one thread may use a conversation at a
    time.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        generate: Generate,
        close_sequence: Callable[[int], None],
        sampling: SamplingParams,
        system: str | None = None,
    ) -> None:
        """Start a conversation. `generate` decodes a continuation, and `close_sequence` frees a sequence of the KV
        cache."""
        self._executor, self._tokenizer, self._template = executor, tokenizer, template
        self._generate, self._sampling = generate, sampling
        self._system: tuple[Message, ...] = ()
        self._messages: list[Message] = []
        self._reply: Reply | None = None
        self._n_regenerated = 0
        self._sequence = executor.cache.open_new()
        self._cached_ids: list[int] = []  # tokens that the sequence holds for certain; it may hold more
        self._finalizer = weakref.finalize(self, _free, close_sequence, self._sequence, template)
        try:
            self.system = system
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        n_messages = len(self.messages)
        what = f"Conversation of {n_messages} message{'s' * (n_messages != 1)}"
        if not self._finalizer.alive:
            return f"<{what}, closed>"
        return f"<{what}, {self.n_cached_tokens} of {self.context_tokens} tokens>"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The system message, if there is one, then the user's messages and the replies alternately."""
        return (*self._system, *self._messages)

    @property
    def sampling(self) -> SamplingParams:
        """Default sampling options for replies."""
        return self._sampling

    @property
    def context_tokens(self) -> int:
        """Maximum number of tokens of prompt and reply together."""
        return self._executor.cache.max_tokens

    @property
    def n_cached_tokens(self) -> int:
        """Number of tokens whose keys and values are kept for the next turn."""
        return len(self._cached_ids)

    @property
    def system(self) -> str | None:
        """The system message, or None. Setting it raises ModelError if the template does not support one."""
        return self._system[0].content if self._system else None

    @system.setter
    def system(self, text: str | None) -> None:
        self._end_reply()
        system = () if text is None or text == "" else (_message("system", text),)
        self._template.render([*system, Message("user", "?")])
        self._system = system

    def send(self, text: str, **changes: Unpack[SamplingChanges]) -> Reply:
        """Return the reply to `text`, an iterator. `changes` are SamplingParams fields for this turn only.

        A reply that is still being generated ends.

        Raises: UsageError, ModelError: immediately; the conversation then stays unchanged.
        """
        self._end_reply()
        params = self._sampling.changed(**changes)
        reply = self._begin(self._messages, _message("user", text), params)
        self._n_regenerated = 0
        return reply

    def regenerate(self, **changes: Unpack[SamplingChanges]) -> Reply:
        """Replace the last reply by another one. The n-th time, its seed is higher by n.

        Raises: UsageError: if there is no reply yet.
        """
        self._end_reply()
        if not self._messages:
            raise UsageError("there is no reply yet that could be generated again; send a message first.")
        *earlier, question, _ = self._messages
        seed = (self._sampling.seed + self._n_regenerated + 1) % N_SEEDS
        reply = self._begin(earlier, question, self._sampling.changed(**{"seed": seed} | changes))
        self._n_regenerated += 1
        return reply

    def restore(self, messages: Sequence[Message], sampling: SamplingParams) -> None:
        """Replace messages and sampling options, for example by those of an earlier conversation.

        Args:
            messages: At most one system message, then user messages and replies alternately.

        Raises:
            UsageError, ModelError: if the messages or options are invalid. The conversation then stays unchanged.
        """
        self._end_reply()
        n_system = int(bool(messages) and messages[0].role == "system")
        turns = [_message(each.role, each.content) if each.content else each for each in messages[n_system:]]
        if [each.role for each in turns] != ["user", "assistant"] * (len(turns) // 2):
            raise UsageError("the messages do not alternate between user and assistant.")
        sampling.require_known(self._executor.spec.vocab_size)
        self._template.render([*messages[:n_system], *turns, Message("user", "?")])
        self._system, self._messages, self._sampling = tuple(messages[:n_system]), turns, sampling
        self._n_regenerated = 0

    def clear(self) -> None:
        """Forget all messages except the system message."""
        self._end_reply()
        self._messages = []

    def close(self) -> None:
        """Free the memory and end the template's process. Closing twice does nothing."""
        if self._reply is not None:
            self._reply.close()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_reply(self) -> None:
        if not self._finalizer.alive:
            raise HeteroError("this conversation is closed; start another with Engine.chat.")
        if self._reply is not None:
            self._reply.close()

    def _begin(self, earlier: list[Message], question: Message, params: SamplingParams) -> Reply:
        params.require_known(self._executor.spec.vocab_size)
        n_forgotten, ids = self._fitted(earlier, question, params)
        n_cached = min(common_length(self._cached_ids, ids), len(ids) - 1)  # the last one's logits are wanted
        n_cached = self._executor.cache.restorable(self._sequence, n_cached)
        tokens = self._generated([*earlier[n_forgotten:], question], ids, n_cached, params)
        self._reply = Reply(tokens, params, len(ids), n_cached, n_forgotten)
        return self._reply

    def _fitted(self, earlier: list[Message], question: Message, params: SamplingParams) -> tuple[int, list[int]]:
        """Return how many of the earlier messages must be forgotten, and the token ids of the other messages."""
        ids = self._encoded([*earlier, question])
        context, n_reply = self.context_tokens, room_for_reply(self.context_tokens, params)
        if len(ids) > context - n_reply:
            context = self._executor.grow(min(self._executor.most_tokens, len(ids) + n_reply))
        quarter, room = max(1, context // 4), context - room_for_reply(context, params)
        if len(ids) <= room:
            return 0, ids
        enough: tuple[int, list[int]] | None = None
        for n_forgotten in range(2, len(earlier) + 1, 2):
            ids = self._encoded([*earlier[n_forgotten:], question])
            if len(ids) <= room - quarter and n_forgotten < len(earlier):
                return n_forgotten, ids
            if len(ids) <= room:
                enough = enough or (n_forgotten, ids)
        if enough is None and len(ids) >= context:
            what = f"the message has {len(ids)} tokens with the system message and the chat template"
            raise UsageError(beyond_context(what, context, self._executor.spec))
        return enough or (len(earlier), ids)

    def _encoded(self, messages: list[Message]) -> list[int]:
        return chat_ids(self._template, self._tokenizer, [*self._system, *messages])

    def _generated(
        self, messages: list[Message], ids: list[int], n_cached: int, params: SamplingParams
    ) -> Generator[GeneratedToken]:
        """Yield the reply's tokens. The state is valid after each step, since Ctrl-C may end the reply at any time."""
        n_cached = min(n_cached, self._executor.cache.length(self._sequence))  # less if a GPU was lost
        n_cached = self._executor.cache.truncate(self._sequence, n_cached)
        self._cached_ids = ids[:n_cached]
        tokens = self._generate(Continuation(self._sequence, ids), params)
        if markers := channel_ids(self._tokenizer):
            tokens = with_thoughts(tokens, markers)
        computed, text = ids[n_cached:], ""
        for token in tokens:
            self._cached_ids.extend(computed)
            computed, text = [token.token_id], text + token.text
            self._messages = [*messages, Message("assistant", answer(text) if markers else text)]
            yield token


def read_messages(given: Messages) -> list[Message]:
    """Check and convert the messages that a caller gave for a reply.

    Raises:
        UsageError: if they are malformed, or the last one is not the user's or a tool's.
    """
    expected = """[{"role": "user", "content": "..."}], with roles system, user and assistant, the user's last."""
    if not isinstance(given, list | tuple) or not given:
        raise UsageError(f"messages are {shown(given)}; expected {expected}")
    messages = list[Message]()
    for each in given:
        is_plain = isinstance(each, Mapping) and each.keys() == {"role", "content"} and each["role"] in ROLES
        if not isinstance(each, Message) and not is_plain:
            raise UsageError(f"messages have {shown(each)}; expected {expected}")
        messages.append(each if isinstance(each, Message) else _message(each["role"], each["content"]))
    if messages[-1].role not in ("user", "tool"):
        raise UsageError(f"the last message is the {messages[-1].role}'s; expected {expected}")
    return messages


def _message(role: str, text: str) -> Message:
    if not isinstance(text, str):
        raise UsageError(f"a message is a string, got {type(text).__name__}.")
    if not text:
        raise UsageError("the message is empty; say something.")
    if len(text) > MAX_MESSAGE_CHARACTERS:
        raise UsageError(f"the message has {len(text)} characters; at most {MAX_MESSAGE_CHARACTERS} are taken.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the message {shown(text)} is not valid Unicode at character {error.start}.") from error
    return Message(role, text)


def _free(close_sequence: Callable[[int], None], sequence: int, template: ChatTemplate) -> None:
    """Free the sequence and the template's process. Called once: by close(), or when the conversation is collected."""
    close_sequence(sequence)
    template.close()
