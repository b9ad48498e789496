"""What a server counts, under the names that vLLM's dashboards ask for, with our prefix in place of its."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hetero_ee.decoding.result import FinishReason
from hetero_ee.serving.scheduler import Scheduler

PREFIX = "hetero_ee:"
LABELS = ["model_name"]
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """Of one server, in a registry of its own."""

    def __init__(self, model_name: str, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        gauges = {
            "num_requests_running": ("Requests that tokens are made for", lambda: scheduler.n_running),
            "num_requests_waiting": ("Requests in the queue", lambda: scheduler.n_waiting),
        }
        for name, (meaning, count) in gauges.items():
            gauge = Gauge(PREFIX + name, meaning, LABELS, registry=self._registry)
            gauge.labels(model_name).set_function(count)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Tokens of prompts that the KV cache held")
        self._generated_tokens = self._counter("generation_tokens", "Tokens generated")
        self._success = Counter(
            PREFIX + "request_success", "Requests answered", [*LABELS, "finished_reason"], registry=self._registry
        )
        self._failed = self._counter("request_failure", "Requests that ended with an error, or that nobody waited for")
        self._queue_s = self._histogram("request_queue_time_seconds", "Time in the queue", SECONDS)
        self._first_s = self._histogram("time_to_first_token_seconds", "From the request to its first token", SECONDS)
        self._between_s = self._histogram("inter_token_latency_seconds", "Between tokens of a text", STEP_SECONDS)
        self._whole_s = self._histogram("e2e_request_latency_seconds", "From the request to its last token", SECONDS)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)

    def begun(self, queue_s: float, n_prompt_tokens: int, n_cached_tokens: int) -> None:
        """A request has left the queue."""
        self._queue_s.labels(self._model).observe(queue_s)
        self._prompt_tokens.labels(self._model).inc(n_prompt_tokens)
        self._cached_tokens.labels(self._model).inc(n_cached_tokens)

    def token(self, since_s: float, *, is_first: bool) -> None:
        """since_s: the request, or the token before."""
        self._generated_tokens.labels(self._model).inc()
        (self._first_s if is_first else self._between_s).labels(self._model).observe(since_s)

    def ended(self, reason: FinishReason | None, whole_s: float) -> None:
        """None: not by its text's end."""
        if reason is None:
            self._failed.labels(self._model).inc()
            return
        word = "stop" if reason is FinishReason.STOP else "length"
        self._success.labels(self._model, word).inc()
        self._whole_s.labels(self._model).observe(whole_s)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(PREFIX + name, meaning, LABELS, registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, meaning, LABELS, buckets=buckets, registry=self._registry)
