"""The models of a server: requests load them by name, and the least recently used one makes room for the next."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Self, TypeVar

from hetero_ee.errors import DeviceMemoryError, HeteroError
from hetero_ee.runtime.devices.device import CPU
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.metrics import MetricFamilies
from hetero_ee.serving.scheduler import STOPPING, BusyError
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.settings import ServerSettings
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.host.memory import memory_info

T = TypeVar("T")
Open = Callable[[str, MetricFamilies], ServedModel]


@dataclass(slots=True, eq=False)
class _Model:
    name: str
    served: ServedModel | None = None  # None unless loaded
    is_loading: bool = False
    is_leaving: bool = False  # being unloaded once its requests end; new requests wait and load it again
    n_requests: int = 0
    last_use: int = 0  # a number that grows with each use
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while it has no requests


class Models:
    """The models that a server offers, of which at most `ServerSettings.models_max` are loaded.

    Call all methods from the server's event loop, except `stop_soon` and `close`.
    """

    def __init__(self, settings: ServerSettings, names: Sequence[str], open_model: Open) -> None:
        """Offer these models without loading any.

        Args:
            open_model: Opens the model of a name and counts in the given metrics. It is called in a separate thread.
        """
        self.settings, self.families, self.created_s = settings, MetricFamilies(), int(time.time())
        self._models, self._open = {name: _Model(name) for name in names}, open_model
        self._switching, self._uses = asyncio.Lock(), count(1)  # the lock is held to load or close models
        self._is_closing = False

    @classmethod
    def single(cls, served: ServedModel) -> Self:
        """Return the only model of a server, which answers every request."""
        name = served.settings.model_name
        models = cls(served.settings, [name], lambda *_: served)
        models.families, models._models[name].served = served.metrics.families, served
        return models

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    @property
    def is_single(self) -> bool:
        """Whether there is one model, so that a request may call it anything."""
        return len(self._models) == 1

    @property
    def problem(self) -> str | None:
        """Reason why requests fail; None if the server works."""
        if self._is_closing:
            return "the server is shutting down"
        return next((served.problem for served in self._loaded() if served.problem is not None), None)

    def served(self, name: str) -> ServedModel | None:
        """Return a model, or None while it is not loaded. Raises: RequestError: if the server does not offer it."""
        return self._found(name).served

    def status(self, name: str) -> str:
        """Return "loaded", "loading" or "unloaded"."""
        model = self._found(name)
        return "loaded" if model.served is not None else "loading" if model.is_loading else "unloaded"

    def named(self, name: str | None) -> str:
        """Return the entry of `names` that a request means. For `name` and the errors, see `using`."""
        return (self._usual() if name is None or self.is_single else self._found(name)).name

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ServedModel]:
        """Load the model if necessary, and keep it loaded until the end of the block.

        Args:
            name: The model that a request names. None: the model being loaded, else the most recently used loaded
                model, else the most recently used one.

        Raises:
            RequestError: if there is no such model.
            HeteroError: if it can't be opened.
        """
        model = self._models[self.named(name)]
        served = await self._taken(model)
        try:
            yield served
        finally:
            self._release(model)

    async def unload(self, name: str) -> None:
        """Close a model once its requests have ended. Raises: RequestError: if there is no such model."""
        model = self._found(name)
        async with self._switching:
            await self._unload(model)

    def stop_soon(self) -> None:
        """End every request with an error, without waiting. Signal handlers may call it."""
        self._is_closing = True
        for served in self._loaded():
            served.scheduler.stop_soon()

    def close(self) -> None:
        """End every request, and close the models and their engines. Closing twice does nothing."""
        self.stop_soon()
        for model in self._models.values():
            served, model.served = model.served, None
            if served is not None:
                _close(served)

    def _loaded(self) -> list[ServedModel]:
        return [each.served for each in list(self._models.values()) if each.served is not None]

    def _found(self, name: str) -> _Model:
        model = self._models.get(name) or self._models.get(name.removesuffix(":latest"))  # ollama's clients append it
        if model is None:
            known = ", ".join(self._models)
            message = f"there is no such model here; this server has {known}."
            raise RequestError(message, "model", status=404, code="model_not_found")
        return model

    def _usual(self) -> _Model:
        def rank(each: _Model) -> tuple[bool, bool, int]:
            return each.is_loading, each.served is not None, each.last_use

        return max(self._models.values(), key=rank)  # of models that were never used, the first

    async def _taken(self, model: _Model) -> ServedModel:
        if model.served is not None and not model.is_leaving:
            return self._counted(model, model.served)
        await self._switching.acquire()
        loading = asyncio.ensure_future(self._switched(model))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:  # the model is loaded nevertheless, for later requests
            loading.add_done_callback(lambda done: self._drop(model, done))
            raise

    def _drop(self, model: _Model, loaded: asyncio.Future[ServedModel]) -> None:
        """End the use of a model by a request that did not wait for it."""
        if not loaded.cancelled() and loaded.exception() is None:
            self._release(model)

    async def _switched(self, model: _Model) -> ServedModel:
        """Return the model, loaded and in use, and release the lock, which the caller acquired."""
        try:
            return self._counted(model, model.served or await self._load(model))
        finally:
            self._switching.release()

    def _counted(self, model: _Model, served: ServedModel) -> ServedModel:
        model.n_requests, model.last_use = model.n_requests + 1, next(self._uses)
        model.idle.clear()
        return served

    def _release(self, model: _Model) -> None:
        model.n_requests -= 1
        if model.n_requests == 0:
            model.idle.set()

    async def _load(self, model: _Model) -> ServedModel:
        while len(self._loaded()) >= self.settings.models_max:
            await self._unload_oldest()
        model.is_loading = True
        try:
            model.served = served = await self._opened(model.name)
        finally:
            model.is_loading = False
        most_bytes = memory_info(this_host()).usable_bytes
        while len(self._loaded()) > 1 and sum(map(_host_bytes, self._loaded())) > most_bytes:
            await self._unload_oldest(except_for=model)
        return served

    async def _opened(self, name: str) -> ServedModel:
        """Open a model. Whenever memory runs out, close the least recently used other model and try again."""
        while True:
            if self._is_closing:
                raise BusyError(STOPPING)
            try:
                return await _in_thread(lambda: self._open(name, self.families))
            except (DeviceMemoryError, MemoryError):
                if not self._loaded():
                    raise
            except HeteroError as error:  # the server's problem, not the request's
                raise RequestError(f"{name} can't be loaded: {error}", status=500, code="model_not_loaded") from error
            await self._unload_oldest()

    async def _unload_oldest(self, except_for: _Model | None = None) -> None:
        """Close the least recently used model, if possible one without requests."""
        loaded = [each for each in self._models.values() if each.served is not None and each is not except_for]
        await self._unload(min(loaded, key=lambda each: (each.n_requests > 0, each.last_use)))

    async def _unload(self, model: _Model) -> None:
        model.is_leaving = True
        try:
            if model.n_requests:
                await asyncio.wait_for(model.idle.wait(), self.settings.request_timeout_s)
            served, model.served = model.served, None
        except TimeoutError:
            raise BusyError(f"{model.name} still answers requests; try again later.") from None
        finally:
            model.is_leaving = False
        if served is not None:
            closing = served
            await _in_thread(lambda: _close(closing))


def _close(served: ServedModel) -> None:
    served.close()
    served.engine.close()


def _host_bytes(served: ServedModel) -> int:
    """Return the RAM that a model needs: by its plan, or all of its memory if it has none."""
    plan = served.engine.plan
    return sum(served.scheduler.memory.values()) if plan is None else plan.n_bytes(CPU)


async def _in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`. Its thread is a daemon, so that a load does not keep the process from ending."""
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="models", daemon=True).start()
    found: T = await result
    return found
