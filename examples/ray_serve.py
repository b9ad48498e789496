"""Replicas of a model's server under Ray Serve: health, least-loaded and prefix-aware routing, rolling updates.

    serve run examples.ray_serve:build model=./my-llama replicas=2      # pip install "ray[serve]" "hetero-ee[server]"
    serve run examples/ray_serve.yaml                                   # the same from a file, for `serve deploy` too

A request that its replica did not begin to answer when it died is given to another; a stream that has begun ends with
an error. docs/replicas.md says how many replicas a load wants.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.routing import Mount

from hetero_ee import Engine
from hetero_ee.serving.app import create_app
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.settings import ServerSettings

PASSED_ON = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers", "scheme", "root_path")
PREFIX_CHARACTERS = 1000  # of a conversation's beginning, by which it finds its replica again
N_KNOWN = 64  # beginnings that a replica is known by
N_TRIES = 3
LOST = "the replica that answered has ended; send the request again."
Message = dict[str, Any]


@serve.deployment
class Replica:
    """A loaded model. model: as Engine.from_pretrained has it, as are the options."""

    def __init__(self, model: str | None, settings: dict[str, Any], options: dict[str, Any]) -> None:
        self._engine = Engine.from_pretrained(model, progress=False, **options)
        self._served = ServedModel(self._engine, ServerSettings(**settings))
        self._app = create_app(self._served)

    async def answer(self, scope: Message, body: bytes, beginning: str) -> AsyncIterator[Message]:
        """The messages of ASGI that answer a request. Closing the iterator ends its text."""
        await self._known(beginning)
        said: asyncio.Queue[Message] = asyncio.Queue()
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()  # who has gone cancels this
            return asked.pop()

        running = asyncio.ensure_future(self._app({**scope, "app": None}, receive, said.put))
        try:
            while True:
                message = await said.get()
                yield message
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    return
        finally:
            running.cancel()

    async def process(self) -> int:
        """Return the process number, for tests that kill a replica."""
        return os.getpid()

    def check_health(self) -> None:
        """Raise if the engine's thread has ended; Ray then replaces the replica."""
        if not self._served.scheduler.is_alive:
            raise RuntimeError("the engine's thread has ended")

    def __del__(self) -> None:
        if hasattr(self, "_served"):
            self._served.close()
        if hasattr(self, "_engine"):
            self._engine.close()

    @serve.multiplexed(max_num_models_per_replica=N_KNOWN)
    async def _known(self, beginning: str) -> str:
        """Make Ray send requests with this prefix here, unless this replica is too busy."""
        return beginning


class _Door:
    """The application that Ray serves. It passes requests to the replica that it runs in."""

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        await serve.get_replica_context().servable_object.handle(scope, receive, send)


@serve.deployment
@serve.ingress(Starlette(routes=[Mount("/", _Door())]))
class Front:
    """Finds a replica for each request, and another one if it dies."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas, self._max_body_bytes = replicas, max_body_bytes

    async def handle(self, scope: Message, receive: Any, send: Any) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http":
            return
        body = await self._body(receive)
        if body is None:
            await _refuse(send, 413, f"the body has more than {self._max_body_bytes} bytes.")
            return
        passed = {name: scope[name] for name in PASSED_ON if name in scope}
        beginning = beginning_of(body)
        has_begun = False
        for _ in range(N_TRIES):
            try:
                async for message in self._asked(passed, body, beginning):
                    has_begun = True
                    await send(message)
                return
            except RayActorError:
                if has_begun:
                    break
        if has_begun:
            error = {"error": {"message": LOST, "type": "server_error", "param": None, "code": None}}
            lost = f"data: {json.dumps(error)}\n\n".encode()
            await send({"type": "http.response.body", "body": lost, "more_body": False})
        else:
            await _refuse(send, 503, LOST)

    def _asked(self, scope: Message, body: bytes, beginning: str) -> AsyncIterator[Message]:
        handle = self._replicas.options(stream=True, multiplexed_model_id=beginning)
        found: AsyncIterator[Message] = handle.answer.remote(scope, body, beginning)
        return found

    async def _body(self, receive: Any) -> bytes | None:
        """None for one that is too large."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False) and message["type"] == "http.request"
            if len(body) > self._max_body_bytes:
                return None
        return bytes(body)


def beginning_of(body: bytes) -> str:
    """A name for what a request's conversation begins with, the same at each of its turns; "none" where it is no
    conversation."""
    try:
        asked = json.loads(body)
        messages = asked.get("messages") or asked.get("prompt")
        first = messages if isinstance(messages, str) else json.dumps(messages[:2])
    except (ValueError, AttributeError, TypeError):
        return "none"
    return hashlib.sha256(first[:PREFIX_CHARACTERS].encode()).hexdigest()[:16]


async def _refuse(send: Any, status: int, why: str) -> None:
    error = {"error": {"message": why, "type": "server_error", "param": None, "code": None}}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error).encode(), "more_body": False})


def build(arguments: dict[str, Any]) -> Any:
    """The application. arguments: `model`, `replicas`, `cpus` and `gpus` of each, `settings` of ServerSettings,
    `options` of Engine.from_pretrained; what is missing is as there."""
    settings = ServerSettings(**arguments.get("settings", {}))
    replicas = Replica.options(
        num_replicas=int(arguments.get("replicas", 2)),
        max_ongoing_requests=settings.n_slots + settings.queue_size,
        ray_actor_options={"num_cpus": float(arguments.get("cpus", 1)), "num_gpus": float(arguments.get("gpus", 0))},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=60,  # of a rolling update: for texts that run
    ).bind(arguments.get("model"), arguments.get("settings", {}), arguments.get("options", {}))
    front = Front.options(num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.1})
    return front.bind(replicas, settings.max_body_bytes)
