"""Atomic operations on 64-bit integers at an address, for compiled code that runs without the GIL."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I64 = ir.IntType(64)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """Load the int64 at `address`. Later loads see everything written before the matching store_release."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Store `value` at `address`, not before all earlier stores of this thread are visible."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:
    """Add `value` to the int64 at `address` and return the previous value."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def replace(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Store `value` if the int64 at `address` equals `expected`; return whether it did (compare-and-swap)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = builder.cmpxchg(_pointer(builder, arguments[0]), arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.intp, types.int64, types.int64), codegen


@intrinsic
def pause(typing: Any) -> Any:
    """Hint to the core that this is a spin loop (x86 PAUSE); does nothing on other architectures."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if "x86_64" in builder.module.triple:
            signature = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_chunk(typing: Any, function: Any, arguments_address: Any, index: Any) -> Any:
    """Call the compiled function void(intp, intp) at address `function`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen
