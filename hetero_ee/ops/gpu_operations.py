"""Choose, once, the operations of a segment of GPU layers from the registry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero_ee.ops.registry import IMPLEMENTATIONS, Registry


@dataclass(frozen=True, slots=True)
class GpuOperations:
    """Functions of hetero_ee_kernels, or others that take the same arguments.

    `is_capturable` means that a CUDA graph can record all of them.
    """

    embed: Callable[..., Any]
    rms_norm: Callable[..., Any]
    layer_norm: Callable[..., Any]
    rms_norm_heads: Callable[..., Any]
    activate: Callable[..., Any]
    kv_write: Callable[..., Any]
    attention: Callable[..., Any]
    gated_delta: Callable[..., Any]
    mamba2: Callable[..., Any]
    short_conv: Callable[..., Any]
    sliced_head: Callable[..., Any]
    masked_linear: Callable[..., Any]
    sparse_ffn: Callable[..., Any]
    first_sections: Callable[..., Any]
    fold_sections: Callable[..., Any]
    draft: Callable[..., Any]
    route: Callable[..., Any]
    fp32_product: Callable[..., Any]
    expert_matmul: Callable[..., Any]
    add_experts: Callable[..., Any]
    matmul_int4: Callable[..., Any]
    matmul_int8: Callable[..., Any]
    add: Callable[..., Any]
    prepare_int4: Callable[..., Any]
    prepare_int8: Callable[..., Any]
    is_capturable: bool


def gpu_operations(registry: Registry, kind: str) -> GpuOperations:
    """Choose each operation for a kind of GPU. Raises UsageError, see Registry.choose."""
    chosen = {each.operation: registry.choose(each.operation, kind) for each in IMPLEMENTATIONS}
    return GpuOperations(
        **{operation: implementation.load() for operation, implementation in chosen.items()},
        add=_add,
        prepare_int4=chosen["matmul_int4"].load_prepare(),
        prepare_int8=chosen["matmul_int8"].load_prepare(),
        is_capturable=all(implementation.is_capturable for implementation in chosen.values()),
    )


def _add(x: Any, y: Any) -> None:
    x += y
