"""Where parts may lie, and what has to hold wherever they do: on an emulated GPU, on a stand-in and on a real one."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.executors.executor import Executor
from tests.kv_contents import read_back

CONTEXT_TOKENS = 128
PROMPT = [1, 17, 30, 3, 99, 42, 42, 7, 12, 77, 101, 5, 64, 8, 9, 10, 3, 2, 55, 31]  # more rows than a launch takes
ALL_GPU, ALL_CPU = (("layers.*|head", "gpu"),), (("layers.*|head", "cpu"),)
PLACEMENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "all on the GPU": ALL_GPU,
    "split": ((r"layers\.0\..*", "gpu"), ("layers.*", "cpu")),
    "attention and FFN apart": ((".*attention", "cpu"), (".*ffn", "gpu"), ("head", "cpu")),
    "FFN and attention apart": ((".*attention", "gpu"), (".*ffn", "cpu"), ("head", "cpu")),
    "streamed": (("layers.*", "stream"),),
    "head alone on the GPU": (("layers.*", "cpu"), ("head", "gpu")),
    "every other layer": ((r"layers\.\d*[02468]\..*", "gpu"), ("layers.*", "cpu")),
    "GPU, streamed, CPU": ((r"layers\.0\..*", "gpu"), (r"layers\.1\..*", "stream"), ("layers.*", "cpu")),
}


def split_at(layer: int) -> tuple[tuple[str, str], ...]:
    """Layers before it on the GPU, the rest on the CPU."""
    first = "|".join(rf"layers\.{number}\..*" for number in range(layer))
    return ((first, "gpu"), ("layers.*", "cpu"))


def visiting(plan: Plan) -> Plan:
    """Everything the CPU has visits the GPU for prompts."""
    parts = (
        replace(part, prefill_placement="visit") if part.decode_placement == "cpu" and part.layer is not None else part
        for part in plan.parts
    )
    return replace(plan, parts=tuple(parts))


def assert_rows_keep_their_bits(executor: Executor, kept: Sequence[int]) -> torch.Tensor:
    """Whatever m is, and when a row is computed again, after others were and all but the `kept` first were forgotten.
    Returns the rows' hidden states."""
    sequence = executor.cache.open_new()
    together = executor.hidden(Batch.of_sequence(sequence, 0, PROMPT[:7])).cpu()
    logits = executor.to_logits(together)
    for n_kept in kept:
        executor.cache.truncate(sequence, n_kept)
        for position in range(n_kept, 7):
            alone = executor.hidden(Batch.of_sequence(sequence, position, [PROMPT[position]]))
            assert torch.equal(alone.cpu()[0], together[position])
            assert torch.equal(executor.to_logits(alone)[0], logits[position])
    return together


def computed_and_stored(executor: Executor) -> list[torch.Tensor]:
    """Two prompts at once, one of them behind tokens that are known: hidden states, and all that the cache then has."""
    mixed = Batch((3, 4, *PROMPT), (1, 0, *[1] * len(PROMPT)), (0, len(PROMPT), *range(1, 1 + len(PROMPT))))
    for sequence in range(2):
        executor.cache.open(sequence)
    hidden = [executor.hidden(Batch.of_sequence(0, 0, PROMPT)), executor.hidden(mixed)]
    kept = [
        part
        for layer in range(executor.spec.n_layers)
        for sequence in range(2)
        for part in read_back(executor.cache, layer, sequence, 0, len(PROMPT) + 1)
    ]
    executor.cache.check()
    return [tensor.cpu() for tensor in (*hidden, *kept)]


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for first, second in zip(found, expected, strict=True):
        assert torch.equal(first, second)
