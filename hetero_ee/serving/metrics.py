"""Metrics under the names of vLLM's and llama-server's dashboards, with our prefix."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hetero_ee.decoding.result import FinishReason, TokenOrigin
from hetero_ee.serving.scheduler import Scheduler

PREFIX = "hetero_ee:"
LABELS = ["model_name"]
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64)
COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "prompt_tokens_cached": "Tokens of prompts that the KV cache held",
    "prefix_cache_queries": "The same as prompt_tokens: all of them are looked up",
    "prefix_cache_hits": "The same as prompt_tokens_cached",
    "prompt_seconds": "From leaving the queue to the first token",
    "generation_tokens": "Tokens generated",
    "tokens_predicted": "The same as generation_tokens",
    "tokens_predicted_seconds": "From a text's first token to its last",
    "request_failure": "Requests that ended with an error, or whose client disconnected",
    "num_preemptions": "Requests that restarted for lack of memory",
    "n_decode": "Steps of the texts that run",
    "spec_decode_num_drafts": "Verifications of drafts",
    "spec_decode_num_draft_tokens": "Tokens drafted",
    "spec_decode_num_accepted_tokens": "Drafts that the full model agreed with",
}
HISTOGRAMS = {
    "request_queue_time_seconds": ("Time in the queue", SECONDS),
    "request_prefill_time_seconds": ("From leaving the queue to the first token", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last", SECONDS),
    "request_inference_time_seconds": ("From leaving the queue to the last token", SECONDS),
    "e2e_request_latency_seconds": ("From the request to its last token", SECONDS),
    "time_to_first_token_seconds": ("From the request to its first token", SECONDS),
    "inter_token_latency_seconds": ("Between tokens of a text", STEP_SECONDS),
    "request_time_per_output_token_seconds": ("The same, on average over a text", STEP_SECONDS),
    "iteration_tokens_total": ("Tokens that a step brought", STEP_TOKENS),
}


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Times and token counts of a finished request."""

    queue_s: float
    prefill_s: float  # from leaving the queue to the first token
    decode_s: float  # from then to the last
    n_prompt_tokens: int
    n_read_tokens: int  # of them, those that the KV cache lacked
    n_tokens: int  # generated


class Metrics:
    """Metrics of one server, in its own registry."""

    def __init__(self, model_name: str, scheduler: Scheduler) -> None:
        self._registry, self._model = CollectorRegistry(), model_name
        # With their label at once, so that they are there, as 0, before anything is counted.
        self._counters = {name: self._counter(name, text).labels(model_name) for name, text in COUNTERS.items()}
        self._histograms = {
            name: Histogram(PREFIX + name, text, LABELS, buckets=each, registry=self._registry).labels(model_name)
            for name, (text, each) in HISTOGRAMS.items()
        }
        self._success = self._counter("request_success", "Requests answered", "finished_reason")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by their place in their step", "position"
        )
        self._n_steps = self._n_busy = 0
        self._longest_tokens = self._n_read = self._n_later = 0  # of requests that ended, as the seconds below
        self._prefill_s = self._decode_s = 0.0
        for name, (meaning, value) in self._gauges(scheduler).items():
            self._gauge(name, meaning).labels(model_name).set_function(value)
        config = {"n_slots": str(scheduler.n_slots), "max_tokens": str(scheduler.most_held_tokens)}
        cache = self._gauge("cache_config_info", "The KV cache as the server began", *config)
        cache.labels(model_name, *config.values()).set(1)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def begun(self, queue_s: float, n_prompt_tokens: int, n_cached_tokens: int, *, is_again: bool) -> None:
        """Count a request that has left the queue."""
        self._observe("request_queue_time_seconds", queue_s)
        self._count("num_preemptions", int(is_again))
        for name in ("prompt_tokens", "prefix_cache_queries"):
            self._count(name, n_prompt_tokens)
        for name in ("prompt_tokens_cached", "prefix_cache_hits"):
            self._count(name, n_cached_tokens)

    def token(self, since_s: float, *, is_first: bool) -> None:
        """Count a token that arrived `since_s` after the one before it, or after the request."""
        self._count("generation_tokens")
        self._count("tokens_predicted")
        self._observe("time_to_first_token_seconds" if is_first else "inter_token_latency_seconds", since_s)

    def drafted(self, origin: TokenOrigin) -> None:
        """Count the draft-verify or early-exit step of a token."""
        if origin.index == 0 and origin.n_drafted:
            self._count("spec_decode_num_drafts")
            self._count("spec_decode_num_draft_tokens", origin.n_drafted)
        if origin.is_accepted:
            self._count("spec_decode_num_accepted_tokens")
            self._accepted_at.labels(self._model, str(origin.index)).inc()

    def step(self, n_running: int, n_tokens: int) -> None:
        """Count a step of the engine with `n_running` requests that yielded `n_tokens`."""
        self._n_steps, self._n_busy = self._n_steps + 1, self._n_busy + n_running
        self._count("n_decode")
        self._observe("iteration_tokens_total", n_tokens)

    def ended(self, reason: FinishReason | None, cost: RequestCost) -> None:
        """Count a finished request. `reason` is None if its text did not end by itself."""
        if reason is None:
            self._count("request_failure")
            return
        self._success.labels(self._model, "stop" if reason is FinishReason.STOP else "length").inc()
        self._count("prompt_seconds", cost.prefill_s)
        self._count("tokens_predicted_seconds", cost.decode_s)
        self._observe("request_prefill_time_seconds", cost.prefill_s)
        self._observe("request_decode_time_seconds", cost.decode_s)
        self._observe("request_inference_time_seconds", cost.prefill_s + cost.decode_s)
        self._observe("e2e_request_latency_seconds", cost.queue_s + cost.prefill_s + cost.decode_s)
        n_later = max(0, cost.n_tokens - 1)  # the first one's time is the prompt's
        if n_later:
            self._observe("request_time_per_output_token_seconds", cost.decode_s / n_later)
        self._longest_tokens = max(self._longest_tokens, cost.n_prompt_tokens + cost.n_tokens)
        self._prefill_s, self._n_read = self._prefill_s + cost.prefill_s, self._n_read + cost.n_read_tokens
        self._decode_s, self._n_later = self._decode_s + cost.decode_s, self._n_later + n_later

    def _gauges(self, scheduler: Scheduler) -> dict[str, tuple[str, Callable[[], float]]]:
        running, waiting = lambda: scheduler.n_running, lambda: scheduler.n_waiting
        rate, busy = lambda: _ratio(self._n_later, self._decode_s), lambda: _ratio(self._n_busy, self._n_steps)
        return {
            "num_requests_running": ("Requests that tokens are made for", running),
            "requests_processing": ("The same", running),
            "num_requests_waiting": ("Requests in the queue", waiting),
            "requests_deferred": ("The same", waiting),
            "kv_cache_usage_perc": (
                "Tokens in the KV cache over those of one context, 1 for all",
                lambda: scheduler.n_held_tokens / scheduler.most_held_tokens,
            ),
            "prompt_tokens_seconds": (
                "Prompt tokens computed a second, on average",
                lambda: _ratio(self._n_read, self._prefill_s),
            ),
            "predicted_tokens_seconds": ("Tokens a second of one text, on average", rate),
            "n_busy_slots_per_decode": ("Texts of a step, on average", busy),
            "n_tokens_max": ("Most tokens of a request so far, prompt and text", lambda: self._longest_tokens),
        }

    def _count(self, name: str, n: float = 1) -> None:
        self._counters[name].inc(n)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, meaning, [*LABELS, *labels], registry=self._registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, meaning, [*LABELS, *labels], registry=self._registry)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
