"""Slot files: a slot's tokens with their keys and values, so that a later server continues without prefill.

A file holds the bytes of the KV cache. They are restored only for the same weights, cache types, placement of layers
and rotary angles. Generation then continues as if the server had never been restarted.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.engine import Engine
from hetero_ee.errors import StoreError, shown
from hetero_ee.kv.cache import LayeredCache
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.scheduler import BusyError
from hetero_ee.serving.slots import Slot, Slots
from hetero_ee.weights.store.record import Arrays, RecordArrays, RecordKind

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
MAX_BYTES = 2**36
TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class _Header:
    n_tokens: int


@dataclass(frozen=True, slots=True)
class SlotContent:
    """Tokens of a slot, and the bytes of each layer's keys, values and scales."""

    token_ids: list[int]
    layers: Arrays

    @property
    def n_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())


KIND = RecordKind(_Header, "slot file", version=1, way_out="save the slot")


class SlotFiles:
    """Reads and writes the slot files of one model. Call `copy` and `install` in the engine's thread.

    Raises:
        RequestError: if the engine's mode keeps state that slot files lack.
    """

    def __init__(self, engine: Engine, folder: Path | None) -> None:
        self._engine, self._folder = engine, folder
        if folder is None:
            raise RequestError("slots can't be saved; start the server with --slot-save-path FOLDER.")
        if engine.calibrations is None:
            raise RequestError("slots of fp32 weights can't be saved; start the server with another --quantizer.")
        if engine.drafting is not None or engine.exits is not None:
            raise RequestError("slots can be saved in mode full only, since drafts and exits keep state of their own.")
        self._calibrations: CalibrationPlace = engine.calibrations

    def write(self, name: str, content: SlotContent) -> None:
        """Write a file, completely or not at all. Raises: StoreError, DiskFullError."""
        tokens = np.array(content.token_ids, np.int64)
        header = _Header(len(content.token_ids))
        KIND.write(self._file(name), self._key(), header, {TOKENS: tokens, **content.layers})

    def read(self, name: str) -> SlotContent:
        """Read a file.

        Raises:
            RequestError: if there is no such file, it is damaged, or was made for another model or placement.
        """

        def made(header: _Header, arrays: RecordArrays) -> SlotContent:
            tokens = arrays.take(TOKENS, np.int64, (header.n_tokens,))
            layers = map(str, self._engine.executor.cache.held_layers)
            return SlotContent(tokens.tolist(), {layer: arrays.take(layer, np.uint8) for layer in layers})

        try:
            content = KIND.read(self._file(name), self._key(), MAX_BYTES, made)
        except StoreError as error:
            raise RequestError(str(error), "filename") from error
        if content is None:
            raise RequestError(f"there is no slot file {shown(name)}.", "filename", status=404)
        return content

    def copy(self, slots: Slots, number: int) -> SlotContent:
        """Return a copy of an idle slot's tokens, keys and values. Raises: RequestError: if it has none."""
        slot, cache, layers = idle(slots, number), self._engine.executor.cache, Arrays()
        n_tokens = 0
        if slot.token_ids:  # the cache may hold fewer: a lost device empties it
            n_tokens = cache.truncate(slot.sequence, min(len(slot.token_ids), cache.length(slot.sequence)))
        if n_tokens == 0:
            raise RequestError(f"slot {number} holds no tokens.")
        for layer in cache.held_layers:
            part = cache.part(layer)
            first = part.first_needed(n_tokens)
            if part.first_stored(slot.sequence, n_tokens) > first:
                raise RequestError(f"slot {number} was cut, and its sliding windows have passed {first}; use it first.")
            found = part.stored(layer, slot.sequence, first, n_tokens)
            layers[str(layer)] = torch.cat([part.cpu().flatten().view(torch.uint8) for part in found]).numpy()
        return SlotContent(slot.token_ids[:n_tokens], layers)

    def install(self, slots: Slots, number: int, content: SlotContent) -> None:
        """Restore a slot file's tokens, keys and values into an idle slot.

        Raises:
            RequestError: if the tokens do not fit the context, or the file's sizes are wrong.
        """
        executor, n_tokens = self._engine.executor, len(content.token_ids)
        n_most = executor.grow(n_tokens)
        if not 0 < n_tokens <= n_most:
            raise RequestError(
                f"the slot file has {n_tokens} tokens; the context holds {n_most}. Raise --ctx-size.", "filename"
            )

        def fill(sequence: int) -> None:
            executor.make_room({sequence: n_tokens})
            executor.remember(sequence, content.token_ids)
            for part in executor.cache.parts:  # growing may have replaced the cache
                for layer in part.held_layers:
                    _restore(part, layer, sequence, n_tokens, torch.from_numpy(content.layers[str(layer)]))

        slots.replace(idle(slots, number), content.token_ids, fill)

    def _key(self) -> str:
        """Return a hash of everything that decides what the bytes of a slot mean."""
        executor = self._engine.executor
        parts = [executor.cache.part(layer) for layer in executor.cache.held_layers]
        layout = [(type(part).__name__, part.kind, part.first_needed(MAX_BYTES) > 0) for part in parts]
        ropes = sorted(repr(rope.for_context(executor.most_tokens)) for rope in executor.spec.ropes)
        key = [self._calibrations.key, layout, ropes, executor.spec.activation_terms]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()

    def _file(self, name: str) -> Path:
        if not NAME.fullmatch(name) or self._folder is None:
            raise RequestError(
                f"filename is {shown(name)}; expected up to 100 letters, digits, dots, - and _.", "filename"
            )
        return self._folder / name


def _restore(part: LayeredCache[Any], layer: int, sequence: int, n_tokens: int, kept: Tensor) -> None:
    """Write a layer's bytes, which begin at its first needed position. Raises: RequestError: if the size is wrong."""
    first = part.first_needed(n_tokens)
    if not part.length(sequence):
        part.adopt(sequence, first, n_tokens)
    like = part.stored(layer, sequence, first, n_tokens)
    sizes = [each.numel() * each.element_size() for each in like]
    if kept.numel() != sum(sizes):
        raise RequestError(f"the slot file's layer {layer} has {kept.numel()} bytes, not {sum(sizes)}.")
    if any(sizes):  # layers that read the keys and values of others have none of their own
        pairs = zip(kept.split_with_sizes(sizes), like, strict=True)
        part.store(layer, sequence, first, [each.view(own.dtype).view(own.shape) for each, own in pairs])


def idle(slots: Slots, number: int) -> Slot:
    """Return a slot that no request uses. Raises: BusyError: if one does."""
    found = slots.idle(number)
    if found is None:
        raise BusyError(f"a request runs in slot {number}; try again later.")
    return found
