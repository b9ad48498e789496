"""Translates PTX instructions to Python: expressions of arithmetic.py's functions, or calls of the Machine `m`."""

import re
from typing import Any

from tests.gpu.ptx.parsing import BARRIER, Instruction
from tests.gpu.ptx.translation import BlockWriter, raw, split_type, vector

ALL_LANES = ("-1", "0xffffffff", "4294967295")
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
INTEGER = {"add": "{0} + {1}", "sub": "{0} - {1}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}"}
INTEGER |= {"not": "~{0}", "neg": "-({0})", "abs": "np.abs({0})"}
INTEGER |= {"min": "np.minimum({0}, {1})", "max": "np.maximum({0}, {1})", "div": "divide({0}, {1})"}
INTEGER |= {"shl": "shifted(np.left_shift, {0}, {1})", "shr": "shifted(np.right_shift, {0}, {1})"}
FP32 = {"abs": "np.abs({0})", "neg": "-({0})", "fma": "canonical(fma({0}, {1}, {2}))"}
FP32 |= {"add": "canonical({0} + {1})", "sub": "canonical({0} - {1})", "mul": "canonical({0} * {1})"}
FP32 |= {"div": "canonical({0} / {1})", "rsqrt": "rounded(lambda v: 1 / np.sqrt(v), {0})"}
FP32 |= {"ex2": "rounded(np.exp2, {0})", "lg2": "rounded(np.log2, {0})", "max": "maximum({0}, {1})"}
PAIRS = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "fma": "fma({}, {}, {})"}
MMA = {  # number of 8-row halves of a matrix fragment, and type of its numbers
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": "2, np.int8",
    "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32": "1, np.int8",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "2, np.float16",
}


def emit(w: BlockWriter, i: Instruction) -> None:
    """Append the Python source of one instruction to its block.

    Raises:
        KeyError, AssertionError, ValueError: if the instruction is unknown.
    """
    name, *parts = i.opcode.split(".")
    kind = parts[-1] if parts else ""
    if BARRIER.match(i.opcode):
        assert not i.guard and i.operands[0] == "0"
    elif i.opcode.startswith("bar.warp.sync"):
        assert i.operands[0] in ALL_LANES
        w.lines.append("m.warp_barrier(c)")
    elif name in ("bra", "ret", "exit"):
        w.condition = w.guard(i)
    elif kind == "f32x2":
        _pairs(w, i, name, parts)
    elif name in SPECIAL:
        SPECIAL[name](w, i, name, parts)
    elif kind == "pred":
        symbol = {"and": "&", "or": "|", "xor": "^", "not": ""}[name]
        operands = [w.predicate(operand) for operand in i.operands[1:]]
        w.assign(i, i.operands[0], f" {symbol} ".join(operands) if symbol else f"~{operands[0]}", "pred")
    elif kind == "f32":
        _float(w, i, name, parts)
    else:
        kinds = [kind, "u32" if name in ("shl", "shr") else kind]
        values = [w.source(operand, kind) for operand, kind in zip(i.operands[1:], kinds, strict=False)]
        w.assign(i, i.operands[0], INTEGER[name].format(*values), kind)


def _move(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    (target, source), kind = i.operands, parts[-1]
    if kind == "pred":
        w.assign(i, target, w.predicate(str(abs(int(source))) if source.lstrip("-").isdigit() else source), "pred")
    elif source.startswith("{"):
        bits, halves = split_type(kind)[1], vector(source)
        size = bits // len(halves)
        words = [f"({w.source(p, f'b{size}')}.astype(U{bits}) << U{bits}({size * n}))" for n, p in enumerate(halves)]
        w.assign(i, target, " | ".join(words), kind)
    elif target.startswith("{"):
        bits, halves = split_type(kind)[1], vector(target)
        size, text = bits // len(halves), w.source(source, f"b{bits}")
        for n, part in enumerate(halves):
            w.assign(i, part, f"({text} >> U{bits}({size * n})).astype(U{size})", f"b{size}")
    else:
        w.assign(i, target, w.source(source, raw(kind)), raw(kind))


def _memory(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    o, kind, n_bytes = i.operands, parts[-1], split_type(parts[-1])[1] // 8
    if parts[0] == "param":
        w.assign(i, o[0], f"m.parameter(c, {o[1].strip('[] ')!r}, U{8 * n_bytes})", raw(kind))
        return
    space = "shared" if "shared" in i.opcode else "global"
    assert space == "shared" or "global" in parts
    place = o[0] if name == "st" else o[1]
    at = w.address(place, 32 if space == "shared" else 64)
    last = f"{w.guard(i)}, {i.site})"
    if name == "ld":
        w.results(i, vector(o[0]), f"m.load(c, {space!r}, {at}, {n_bytes}, {len(vector(o[0]))}, {last}", raw(kind))
    elif name == "st":
        w.lines.append(f"m.store(c, {space!r}, {at}, {n_bytes}, {w.values(vector(o[1]), f'b{8 * n_bytes}')}, {last}")
    else:
        assert space == "global" and "add" in parts
        w.lines.append(f"t = m.atomic_add(c, {at}, {n_bytes}, {w.values(vector(o[2]), kind)}[0], {last}")
        w.assign(i, o[0], "t", kind)


def _matrix(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    is_load, is_transposed = name == "ldmatrix", "trans" in parts
    assert "m8n8" in parts
    at, registers = w.address(i.operands[is_load], 32), vector(i.operands[not is_load])
    if is_load:
        w.results(i, registers, f"m.ldmatrix(c, {at}, {len(registers)}, {is_transposed}, {i.site})", "b32")
    else:
        assert not is_transposed
        w.lines.append(f"m.stmatrix(c, {at}, {w.values(registers, 'b32')}, {i.site})")


def _compare(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    how, kind = parts[0], parts[-1]
    assert len(parts) == 2
    kind = kind.replace("b", "u")
    a, b = (w.source(operand, kind) for operand in i.operands[1:])
    if how == "num":
        text = f"({a} == {a}) & ({b} == {b})"
    elif kind[0] == "f" and how == "ne":
        text = f"({a} != {b}) & ({a} == {a}) & ({b} == {b})"
    elif how.endswith("u"):
        text = f"({a} {COMPARISONS[how[:-1]]} {b}) | ({a} != {a}) | ({b} != {b})"
    else:
        text = f"{a} {COMPARISONS[how]} {b}"
    w.assign(i, i.operands[0], text, "pred")


def _select(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    a, b = (w.source(operand, raw(parts[-1])) for operand in i.operands[1:3])
    w.assign(i, i.operands[0], f"np.where({w.predicate(i.operands[3])}, {a}, {b})", raw(parts[-1]))


def _convert(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    o = i.operands
    to, of = (part for part in parts if re.fullmatch(r"[usbf]\d+|f16x2|bf16", part))
    modes = [part for part in parts if part not in (to, of)]
    if to == "f16x2":
        assert of == "f32" and modes == ["rn"]
        high, low = (f"to_float({w.source(part, 'f32')}, F16).view(U16).astype(U32)" for part in o[1:])
        w.assign(i, o[0], f"{high} << U32(16) | {low}", "b32")
        return
    value = w.source(o[1], of)
    if "ftz" in modes and of == "f32":
        value = f"flush({value})"
    kind = {"s": "I", "u": "U", "f": "F"}[to[0]] + to[1:]
    if of[0] == "f" and to[0] == "f":
        assert int(to[1:]) > int(of[1:]) or "rn" in modes
        text = f"to_float({value}, {kind})"
    elif of[0] == "f":
        assert "rzi" in modes
        text = f"to_integer({value}, {kind})"
    else:
        assert modes == ["rn"] * (to[0] == "f")
        text = f"({value}).astype({kind})"
    w.assign(i, o[0], text, to)


def _multiply(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    """Translate mul and mad of integers (lo, hi or wide), or pass a float instruction on."""
    how, kind = (["", *parts])[-2:]
    if kind[0] == "f":
        _float(w, i, name, parts)
        return
    letter, bits = split_type(kind)
    a, b = (w.source(operand, kind) for operand in i.operands[1:3])
    wide = f"{'I' if letter == 's' else 'U'}{2 * bits}"
    text = {"wide": f"({a}).astype({wide}) * ({b}).astype({wide})", "lo": f"{a} * {b}", "hi": f"mul_hi({a}, {b})"}[how]
    kind = f"{letter}{2 * bits}" if how == "wide" else kind
    w.assign(i, i.operands[0], f"({text}) + {w.source(i.operands[3], kind)}" if name == "mad" else text, kind)


def _float(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    """Translate an fp32 instruction. Without a rounding mode, ptxas may fuse it, so its bits are undefined."""
    assert parts[-1] == "f32" and not set(parts) - {"f32", "rn", "ftz", "approx", "full"}
    values = [w.source(operand, "f32") for operand in i.operands[1:]]
    values = [f"flush({value})" for value in values] if "ftz" in parts else values
    if name == "max" and len(values) == 3:  # Blackwell has it
        values = [FP32[name].format(*values), values[2]]
    assert len(values) == FP32[name].count("{")
    text = FP32[name].format(*values)
    if "approx" in parts or "full" in parts:
        text = f"m.approximate({text})"
    w.assign(i, i.operands[0], f"flush({text})" if "ftz" in parts else text, "f32")


def _pairs(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    """Translate an instruction on both fp32 halves of 64-bit registers."""
    assert parts == ["rn", "f32x2"]
    halves = []
    for at in (0, 32):
        values = [f"({w.source(operand, 'b64')} >> U64({at})).astype(U32).view(F32)" for operand in i.operands[1:]]
        halves.append(f"canonical({PAIRS[name].format(*values)}).view(U32).astype(U64)")
    w.assign(i, i.operands[0], f"{halves[0]} | {halves[1]} << U64(32)", "b64")


def _warp(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    o = i.operands
    if name == "shfl":
        assert o[4] in ALL_LANES and "|" not in o[0]
        a, by, clamp = w.source(o[1], "b32"), w.source(o[2], "u32"), w.source(o[3], "u32")
        w.assign(i, o[0], f"m.shuffle(c, {a}, {by}, {clamp}, {parts[1]!r})", "b32")
    elif name == "redux":
        kind = parts[-1].replace("b", "u")
        w.assign(i, o[0], f"m.redux(c, {w.source(o[1], kind)}, {parts[1]!r})", kind)
    else:
        a, b, start = (w.values(vector(part), "b32") for part in o[1:])
        w.results(i, vector(o[0]), f"m.mma(c, {a}, {b}, {start}, {MMA[i.opcode]})", "b32")


def _bits(w: BlockWriter, i: Instruction, name: str, parts: list[str]) -> None:
    o, kind = i.operands, parts[-1]
    if name == "dp4a":
        assert parts == ["s32", "s32"]
        text = f"dp4a({', '.join(w.source(x, 'b32') for x in o[1:4])})"
    elif name == "lop3":
        text = f"lop3({', '.join(w.source(x, 'b32') for x in o[1:4])}, {int(o[4], 0)})"
    else:
        kinds = {"prmt": ("b32", "b32", "b32"), "bfe": (kind, "u32", "u32")}[name]
        text = f"{name}({', '.join(w.source(x, k) for x, k in zip(o[1:], kinds, strict=True))})"
    w.assign(i, o[0], text, kind if name == "bfe" else "b32")


SPECIAL: dict[str, Any] = {"mov": _move, "cvta": _move, "setp": _compare, "selp": _select, "cvt": _convert}
SPECIAL |= dict.fromkeys(("ld", "st", "atom"), _memory) | dict.fromkeys(("ldmatrix", "stmatrix"), _matrix)
SPECIAL |= dict.fromkeys(("mul", "mad"), _multiply) | dict.fromkeys(("shfl", "redux", "mma"), _warp)
SPECIAL |= dict.fromkeys(("dp4a", "lop3", "prmt", "bfe"), _bits)
