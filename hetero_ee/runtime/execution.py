"""Makes a plan ready to run: claims its memory before loading anything, then makes an executor for each device."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import EARLY_EXIT_MODES
from hetero_ee.planning.plan import SEQUENCE, Plan
from hetero_ee.planning.planner import check_fits
from hetero_ee.planning.schedule import BEST_OF_DRAFTS
from hetero_ee.planning.times.traffic import KV, WEIGHTS
from hetero_ee.runtime.devices.device import CPU, GPU, Allocation, Device
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.executors.executor import BlockExecutor, HostExecutor
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.route import Route
from hetero_ee.runtime.streaming.streaming import WeightStream
from hetero_ee.runtime.streaming.weight_streams import WeightStreams, streamed_blocks, visiting_bytes
from hetero_ee.weights.model_weights import ModelWeights

TOKEN_ID = 0  # of warm-up passes
Layers = tuple[int, ...]  # layers whose keys and values are on a device


def open_plan(
    spec: ModelSpec,
    weights: ModelWeights,
    plan: Plan,
    machine: Machine,
    make_cpu: Callable[[Layers], HostExecutor],
    make_gpu: Callable[[Layers], BlockExecutor] | None = None,
) -> PlannedExecutor:
    """Return an executor of the plan on this machine, to be closed by the caller.

    Args:
        make_cpu, make_gpu: make a device's executor with the KV cache of these layers. Without make_gpu, as for an
            emulated GPU, make_cpu is used for both.

    Raises:
        UsageError: if the plan is for another model.
        DeviceMemoryError: if a device has too little memory for the plan.
    """
    check_fits(plan, spec)
    route = Route(plan, decoder_blocks(spec))
    with ExitStack() as opened:
        claims = _claimed(plan, machine, opened)
        cpu = make_cpu(route.state_layers(on_gpu=False))
        opened.callback(cpu.close)
        gpu, streams = None, None
        if any(term.device == GPU for term in plan.memory):
            gpu = (make_gpu or make_cpu)(route.state_layers(on_gpu=True))
            opened.callback(gpu.close)
            streams = _streams(spec, weights, plan, route, machine, cpu, gpu)
        executor = PlannedExecutor(spec, weights, plan, machine, cpu, gpu, streams, claims)
        opened.pop_all()
        return executor


def _streams(
    spec: ModelSpec,
    weights: ModelWeights,
    plan: Plan,
    route: Route,
    machine: Machine,
    cpu: HostExecutor,
    gpu: BlockExecutor,
) -> WeightStreams | None:
    blocks = streamed_blocks(route, range(spec.n_layers))
    if not blocks:
        return None
    assert machine.make_source is not None and machine.link is not None, "only a GPU has weights streamed to it"
    weight_bytes = {part.name: part.weight_bytes for part in plan.parts}
    copier = machine.copier

    def compute(block: Block, borrowed: ModelWeights, hidden: Tensor, batch: Batch) -> Tensor:
        return copier.to_gpu(gpu.forward_with(hidden, batch, block, borrowed))

    def visit(block: Block, borrowed: ModelWeights, hidden: Tensor, batch: Batch) -> Tensor:
        return copier.to_gpu(gpu.attend_uploaded(hidden, batch, block, borrowed, cpu))

    more_bytes = visiting_bytes(blocks, route, cpu.cache, plan.kv_type)

    def count(number: int) -> None:
        machine.traffic.moved(WEIGHTS, weight_bytes[blocks[number].name], to_gpu=True)
        if n_bytes := more_bytes(number):
            machine.traffic.moved(KV, n_bytes, to_gpu=True)

    source = machine.make_source(blocks, weights, machine.link, more_bytes)
    stream = WeightStream(source, range(len(blocks)), machine.new_worker(), count)
    may_exit = plan.mode in EARLY_EXIT_MODES
    exiting = [block for block in blocks if route.place(block).is_streamed] if may_exit else []
    return WeightStreams(stream, blocks, machine, compute, visit, plan.kv_type, exiting)


def _claimed(plan: Plan, machine: Machine, opened: ExitStack) -> list[Allocation]:
    """Claim the memory of each term of the plan. If opening fails, `opened` frees it."""
    devices: dict[str, Device] = {CPU: machine.cpu} | ({GPU: machine.gpu} if machine.gpu is not None else {})
    claims = []
    for term in plan.memory:
        if term.device in devices:
            claims.append(devices[term.device].allocate(term.n_bytes, term.name))
            opened.callback(claims[-1].free)
    return claims


def warmed_up(executor: PlannedExecutor) -> PlannedExecutor:
    """Run a whole prompt chunk and verifications of every size, then return the executor.

    So missing memory for a long prompt is noticed at once, kernels are compiled and graphs recorded. The cache is empty
    afterwards. Plans without a GPU are not warmed up, since that would take as long as a prompt.

    Raises:
        DeviceMemoryError: if memory runs out. After any error the executor is closed.
    """
    if not executor.plan.n_bytes(GPU):
        return executor
    try:
        _pass_largest(executor)
    except BaseException:
        executor.close()
        raise
    return executor


def _pass_largest(executor: PlannedExecutor) -> None:
    cache = executor.cache
    n_tokens = min(executor.prompt_chunk_tokens, cache.max_tokens)
    sequence = cache.open_new()
    try:
        executor.prompt([Batch.of_sequence(sequence, 0, [TOKEN_ID] * n_tokens)])
        for m in range(1, min(_longest_verification(executor.plan), n_tokens) + 1):
            cache.truncate(sequence, n_tokens - m)
            _pass_step(executor, Batch.of_sequence(sequence, n_tokens - m, [TOKEN_ID] * m))
    finally:
        cache.close(sequence)


def _longest_verification(plan: Plan) -> int:
    """Return the maximum tokens of a verification. Draft sequences may exceed the plan's draft length."""
    return min(max(plan.draft_length, BEST_OF_DRAFTS if plan.drafts == SEQUENCE else 1), MAX_DECODE_TOKENS)


def _pass_step(executor: PlannedExecutor, batch: Batch) -> None:
    """Run a draft and a verification of the batch: to the plan's exit layer and, with as many rows, from there on."""
    every, exit_layer = range(executor.spec.n_layers), executor.plan.exit_layer or 0
    hidden = None
    for layers in (every[:exit_layer], every[exit_layer:]):
        if layers:
            hidden = executor.run(batch, hidden, layers)
    assert hidden is not None, "a model has a layer"
    executor.to_logits(hidden)
