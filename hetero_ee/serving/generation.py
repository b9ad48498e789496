"""One request in asyncio: receives tokens from the engine's thread, measures times, and ends the request."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from hetero_ee.decoding.result import FinishReason, GeneratedToken
from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.metrics import Metrics, RequestCost
from hetero_ee.serving.protocols.logprobs import PlacedToken
from hetero_ee.serving.scheduler import Begun, Event, Job, Scheduler, Scored, Scoring


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompt that the answer repeats at its beginning."""

    text: str
    offsets: list[int]  # offset of each token in the text
    scoring: Scoring | None  # None: without log-probabilities


class Generation:
    """A queued or running request. Callers must iterate to its end or close it."""

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: Metrics,
        prompt_ids: list[int],
        params: SamplingParams,
        timeout_s: float,
        echo: Echo | None = None,
        *,
        keeps_tokens: bool = False,
    ) -> None:
        """Queue the request.

        Args:
            echo: The prompt, if the answer repeats it.
            keeps_tokens: Whether to collect the tokens in `kept`.

        Raises:
            BusyError: if the queue is full.
        """
        loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[float, Event]]()

        def tell(event: Event) -> None:  # from the engine's thread, whose time counts: the loop may be late
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, (time.monotonic(), event))

        self._job = Job(prompt_ids, params, tell, None if echo is None else echo.scoring)
        self._scheduler, self._metrics = scheduler, metrics
        self._start_s = self._begun_s = self._first_s = self._last_s = time.monotonic()
        self._timeout_s, self._is_begun, self._is_over, self._echo = timeout_s, False, False, echo
        self.n_prompt_tokens, self.n_cached_tokens, self.n_tokens = len(prompt_ids), 0, 0
        self.slot_number = -1  # -1 until the request runs in a slot
        self._untold = self.text = "" if echo is None else echo.text
        self.placed: list[PlacedToken] = []  # tokens with log-probabilities
        self.kept: list[GeneratedToken] = []
        self._keeps_tokens, self._n_drafted, self._n_accepted = keeps_tokens, 0, 0
        self.reason: FinishReason | None = None  # until the last token is there
        self.stopped_by: str | None = None  # the stop string that ended it
        self.notice = ""  # for the server's log, once the request has ended
        scheduler.submit(self._job)

    async def tokens(self, ping_s: float | None = None) -> AsyncIterator[GeneratedToken | None]:
        """Yield the tokens as they arrive, and None whenever no token has arrived for `ping_s` seconds.

        Raises:
            RequestError: after the request's timeout.
            HeteroError: if the request fails.
        """
        try:
            # In Python 3.11, wait_for loses a cancellation if a token arrives at the same time.
            while self.reason is None and not self._is_over:
                happened = await self._next(ping_s)
                if happened is None:
                    yield None
                    continue
                at_s, event = happened
                if isinstance(event, HeteroError):
                    raise event
                if isinstance(event, Begun):
                    self._begin(event, at_s)
                elif isinstance(event, Scored):
                    self._score(event, at_s)
                else:
                    self._take(event, at_s)
                    yield event
        finally:
            self.close()

    async def finish(self) -> None:
        """Wait until the whole text is generated. Raises: see `tokens`."""
        async for _ in self.tokens():
            pass

    def taken_echo(self) -> str:
        """Return the echoed prompt in the first call, and an empty string later."""
        text, self._untold = self._untold, ""
        return text

    def end(self) -> None:
        """End the request with finish reason STOP."""
        self.reason = FinishReason.STOP
        self.close()

    def close(self) -> None:
        """End the request within one step, if it is still running. Closing twice does nothing."""
        if not self._is_over:
            self._is_over = True
            self._scheduler.cancel(self._job)
            self._metrics.ended(self.reason, self.cost())
            counts, seconds = (self.n_prompt_tokens, self.n_tokens), self._last_s - self._first_s
            self.notice = self._scheduler.dropped_profile(*counts, seconds)

    @property
    def finish_reason(self) -> str:
        """Reason for the end of the request, in OpenAI's words."""
        return "stop" if self.reason is FinishReason.STOP else "length"

    def timings(self) -> dict[str, float]:
        """Return timings in llama-server's format. The prompt's time includes the first token."""
        n_read, prompt_s = self.n_prompt_tokens - self.n_cached_tokens, self._first_s - self._begun_s
        n_steps, steps_s = max(0, self.n_tokens - 1), self._last_s - self._first_s
        drafts = {"draft_n": self._n_drafted, "draft_n_accepted": self._n_accepted} if self._n_drafted else {}
        return (
            {"cache_n": self.n_cached_tokens}
            | _rates("prompt", n_read, prompt_s, n_read)
            | _rates("predicted", self.n_tokens, steps_s, n_steps)
            | drafts
        )

    def cost(self) -> RequestCost:
        """Return the times and token counts so far."""
        queue_s, prefill_s = self._begun_s - self._start_s, self._first_s - self._begun_s
        n_read = self.n_prompt_tokens - self.n_cached_tokens
        return RequestCost(
            queue_s, prefill_s, self._last_s - self._first_s, self.n_prompt_tokens, n_read, self.n_tokens
        )

    async def _next(self, ping_s: float | None) -> tuple[float, Event] | None:
        left_s = self._start_s + self._timeout_s - time.monotonic()
        try:
            return await asyncio.wait_for(self._events.get(), left_s if ping_s is None else min(left_s, ping_s))
        except TimeoutError:
            if time.monotonic() - self._start_s < self._timeout_s:
                return None
            message = f"the answer was not complete after {self._timeout_s:g} s, the server's --timeout."
            raise RequestError(message, status=504, code="timeout") from None

    def _begin(self, event: Begun, at_s: float) -> None:
        """Record that the request has started, or has restarted for lack of memory."""
        is_again, self._is_begun = self._is_begun, True
        self._begun_s, self.n_cached_tokens, self.slot_number = at_s, event.n_cached_tokens, event.slot_number
        self._metrics.begun(at_s - self._start_s, self.n_prompt_tokens, self.n_cached_tokens, is_again=is_again)

    def _score(self, event: Scored, now_s: float) -> None:
        if self._echo is None or self._echo.scoring is None:
            return
        ids, logprobs = self._job.prompt_ids, [None, *event.logprobs]
        self.placed += map(PlacedToken, ids, self._echo.offsets, logprobs)
        if self._echo.scoring.is_all:
            self._first_s = self._last_s = now_s
            self.reason = FinishReason.LENGTH

    def _take(self, token: GeneratedToken, now_s: float) -> None:
        is_first = self.n_tokens == 0
        self._metrics.token(now_s - (self._start_s if is_first else self._last_s), is_first=is_first)
        if is_first:
            self._first_s = now_s
        self._last_s, self.reason, self.stopped_by = now_s, token.finish_reason, token.stopped_by
        self.n_tokens += 1
        if token.logprobs is not None:
            self.placed.append(PlacedToken(token.token_id, len(self.text), token.logprobs))
        if self._keeps_tokens:
            self.kept.append(token)
        if token.origin is not None:
            self._metrics.drafted(token.origin)
            self._n_drafted += token.origin.n_drafted if token.origin.index == 0 else 0
            self._n_accepted += token.origin.is_accepted
        self.text += token.text


def _rates(name: str, n_tokens: int, seconds: float, n_timed: int) -> dict[str, float]:
    return {
        f"{name}_n": n_tokens,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n_timed if n_timed else 0.0,
        f"{name}_per_second": n_timed / seconds if seconds > 0 else 0.0,
    }
