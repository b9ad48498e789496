"""A pass of the largest size right after loading: what the first long prompt would have no memory for fails at once."""

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.executors.planned import PlannedExecutor

TOKEN_ID = 0


def warmed_up(executor: PlannedExecutor) -> PlannedExecutor:
    """The executor, after a whole chunk of a prompt and one row of decoding have passed all of its blocks.

    Kernels are compiled and graphs recorded on the way; nothing stays in the cache. A plan without a GPU is left as it
    is: the CPU's memory is not refused a pass, and opening would take as long as a prompt. Raises what the passes
    raise, DeviceMemoryError where memory runs out, and has closed the executor then.
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
        cache.truncate(sequence, n_tokens - 1)
        executor.logits(Batch.of_sequence(sequence, n_tokens - 1, [TOKEN_ID]), (0,))
    finally:
        cache.close(sequence)
