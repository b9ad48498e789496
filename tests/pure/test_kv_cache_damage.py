"""check() finds every kind of damage to a KV cache's books, and nothing where there is none."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.errors import HeteroError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee_kernels.pages import PAGE_TOKENS
from tests.kv_cache_machine import KINDS, LAYERS, SHAPE

MAX_TOKENS = 600
Damage = Callable[[Any, Any], None]  # to what the cache keeps of sequence 0, and of sequence 1


def filled(cache: Any) -> Any:
    """Two sequences, of which one has rows that wait, and room after a third."""
    for sequence in range(3):
        cache.open(sequence)
    cache.admit(Batch.of_sequence(0, 0, [1] * 70))
    cache.admit(Batch.of_sequence(2, 0, [1] * 70))
    cache.admit(Batch.of_sequence(1, 0, [1] * 70), range(3))
    cache.admit(Batch.of_sequence(1, 0, [1] * 2), range(3, 6))
    cache.close(2)
    return cache


def assert_found(cache: Any, damage: Damage) -> None:
    cache.check()
    damage(cache._sequences[0], cache._sequences[1])
    with pytest.raises(HeteroError, match=r"cache of sequence [01] is damaged"):
        cache.check()


def lengths(*wrong: int) -> Damage:
    return lambda held, _: setattr(held, "lengths", list(wrong))


def part(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(held: Any, _: Any) -> None:
        parts = list(held.parts)
        parts[index] = change(parts[index])
        held.parts = tuple(parts)

    return damage


LENGTHS: dict[str, Damage] = {
    "a later layer is ahead": lengths(70, 70, 71, 70),
    "negative": lengths(70, 70, 70, -1),
    "all negative": lengths(-1, -1, -1, -1),
    "a layer too few": lengths(70, 70, 70),
    "a layer too many": lengths(70, 70, 70, 70, 70),
    "beyond the room": lengths(257, 70, 70, 70),
    "beyond the most": lengths(MAX_TOKENS + 1, 70, 70, 70),
}
PARTS: dict[str, Damage] = {
    "values end early": part(1, lambda values: values[:, :, :255].clone()),
    "keys end early": part(0, lambda keys: keys[:, :, :255].clone()),
    "a layer is missing": part(0, lambda keys: keys[:3].clone()),
    "another type": part(1, lambda values: values.to(torch.float64)),
    "another order": part(0, lambda keys: keys.transpose(0, 1).contiguous().transpose(0, 1)),
    "flat": part(0, torch.flatten),
    "keys are values": lambda held, _: setattr(held, "parts", (held.parts[0], held.parts[0], *held.parts[2:])),
    "no values": lambda held, _: setattr(held, "parts", held.parts[:1]),
    "nothing": lambda held, _: setattr(held, "parts", ()),
    "another sequence's": lambda held, other: setattr(held, "parts", other.parts),
    "more room than allowed": lambda held, _: setattr(
        held, "parts", tuple(torch.from_numpy(np.pad(p, [(0, 0), (0, 0), (0, 400)] + [(0, 0)] * (p.ndim - 3)))
                             for p in map(torch.Tensor.numpy, held.parts))
    ),
}  # fmt: skip
SCALES: dict[str, Damage] = {
    "scales end early": part(3, lambda scales: scales[:, :, :255].clone()),
    "scales in fp16": part(2, torch.Tensor.half),
    "no scales": lambda held, _: setattr(held, "parts", held.parts[:2]),
    "scales are codes": lambda held, _: setattr(held, "parts", held.parts[:2] * 2),
}
GPU_LENGTHS = {name: damage for name, damage in LENGTHS.items() if name != "beyond the room"}
PAGES: dict[str, Damage] = {
    "beyond the room": lengths(2 * PAGE_TOKENS + 1, 70, 70, 70),
    "a page too few": lambda held, _: held.pages.pop(),
    "a page twice": lambda held, _: held.pages.append(held.pages[0]),
    "another's page": lambda held, other: held.pages.__setitem__(0, other.pages[0]),
    "a page that isn't there": lambda held, _: held.pages.__setitem__(0, 99),
    "a negative page": lambda held, _: held.pages.__setitem__(0, -1),
    "other pages than in the table": lambda held, _: held.pages.reverse(),
    "another's slot": lambda held, other: setattr(held, "slot", other.slot),
    "a slot that isn't there": lambda held, _: setattr(held, "slot", 16),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [*LENGTHS.values(), *PARTS.values()], ids=[*LENGTHS, *PARTS])
def test_damage_in_memory(damage: Damage, kind: str) -> None:
    assert_found(filled(CpuKvCache(*SHAPE, MAX_TOKENS, layers=LAYERS, kind=kind)), damage)


@pytest.mark.parametrize("damage", SCALES.values(), ids=SCALES)
def test_damage_to_scales(damage: Damage) -> None:
    assert_found(filled(CpuKvCache(*SHAPE, MAX_TOKENS, layers=LAYERS, kind="int8")), damage)


@pytest.mark.parametrize("damage", [*GPU_LENGTHS.values(), *PAGES.values()], ids=[*GPU_LENGTHS, *PAGES])
def test_damage_on_the_gpu(damage: Damage) -> None:
    assert_found(filled(GpuKvCache(SHAPE, MAX_TOKENS, torch.device("cpu"), layers=LAYERS, kind="fp16")), damage)


def test_damage_to_the_gpu_s_table() -> None:
    cache = filled(GpuKvCache(SHAPE, MAX_TOKENS, torch.device("cpu"), layers=LAYERS, kind="fp16"))
    cache.pages.table[cache.slots(Batch.of_sequence(1, 0, [0]))[0], 1] += 1
    with pytest.raises(HeteroError, match="sequence 1 is damaged"):
        cache.check()
