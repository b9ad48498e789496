"""The Arm form of the innermost steps of matmul and sparse FFN, compiled wherever LLVM has that backend, and read.

It was never run: no Arm machine was at hand. Its arithmetic is that of the other instruction sets, exact in integers.
"""

from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from hetero_ee_cpu_ops.neurons.row_sums import I8X64, _dot, _quad
from hetero_ee_cpu_ops.simd.bytes import I32X16, constant, load
from hetero_ee_cpu_ops.tile_group import Emitter
from hetero_ee_cpu_ops.tile_kind import BYTES, CODEBOOK, LINEAR, TileKind

TRIPLE = "aarch64-unknown-linux-gnu"


def assembly(kind: TileKind, features: str) -> str:
    """Machine code of one group's sum for one row: (tile, table, x, offset, out) -> 16 int32 at out."""
    context = SimpleNamespace(codegen=lambda: SimpleNamespace(_tm_features=features))
    module = ir.Module()
    address = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [address] * 5), "group")
    builder = ir.IRBuilder(function.append_basic_block())
    tile, table, x, offset, out = function.args
    emitter: Any = Emitter(context, builder, kind)
    ((sums,),) = emitter.group_sums(emitter.operands(tile, table, (0, 1)), x, offset, [0])
    builder.store(sums, builder.inttoptr(out, sums.type.as_pointer())).align = 4
    return machine_code(builder, module, features)


def machine_code(builder: Any, module: Any, features: str) -> str:
    """Of the function that the builder has just written."""
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = TRIPLE
    parsed.verify()
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize("kind", [LINEAR, CODEBOOK, BYTES])
def test_arm_code_has_dot_products_and_table_lookups(kind: TileKind) -> None:
    code = assembly(kind, "+neon,+dotprod")
    assert code.count("sdot") == 32  # 8 operands of 16 rows x 4 columns, four registers each
    assert ("tbl" in code) == (kind == CODEBOOK)
    assert "sdot" not in assembly(kind, "+neon")


def row_assembly(features: str) -> str:
    """Of a unit's entries in four rows, and of one step of 64 products: (lines, table, x, out)."""
    context: Any = SimpleNamespace(codegen=lambda: SimpleNamespace(_tm_features=features))
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4), "rows")
    builder = ir.IRBuilder(function.append_basic_block())
    lines, table, x, out = function.args
    values = _quad(context, builder, lines, ir.Constant(out.type, 0), table)
    values.append(_dot(context, builder, values[0], load(builder, x, I8X64), constant(I32X16, 0)))
    for value in values:
        builder.store(value, builder.inttoptr(out, value.type.as_pointer())).align = 4
        out = builder.add(out, ir.Constant(out.type, 64))
    return machine_code(builder, module, features)


def test_arm_code_of_rows_has_dot_products_and_table_lookups() -> None:
    code = row_assembly("+neon,+dotprod")
    assert code.count("sdot") == 4 and code.count("\ttbl\t") >= 16  # four rows of 64 columns, and interleaving
    assert "sdot" not in row_assembly("+neon")
