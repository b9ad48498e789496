"""Read the quantization format of checkpoints, quantization_config of config.json, strictly.

Only fields that decide what the weights mean are checked; fields about how they were made (damp_percent, observer, ...)
are ignored. Sources: the files that AutoGPTQ, GPTQModel, AutoAWQ, compressed-tensors and transformers write.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_ee.errors import ModelError, shown
from hetero_ee.models.fields import MAX_SIZE, Fields

BITSANDBYTES, GPTQ, AWQ, COMPRESSED_TENSORS, FP8 = "bitsandbytes", "gptq", "awq", "compressed-tensors", "fp8"
MXFP4 = "mxfp4"  # gpt-oss's experts
FOUR_BIT_TYPES = ("nf4", "fp4")
METHODS = {
    BITSANDBYTES: "bitsandbytes",
    GPTQ: "GPTQ",
    AWQ: "AWQ",
    COMPRESSED_TENSORS: "compressed-tensors",
    FP8: "FP8",
    MXFP4: "gpt-oss's",
}
ADVICE = "give the original weights, a GGUF file, or a copy in 4 bits by GPTQ, AWQ, compressed-tensors or bitsandbytes"
GROUP_COLUMNS = 32  # of a tile; a file's groups must be multiples
MARKED_PATTERN = "re:"  # prefix of a regular expression among the ignored modules


@dataclass(frozen=True, slots=True)
class SavedFormat:
    """The format of all matrices that a checkpoint does not store as floats."""

    method: str
    values: str  # "nf4", "fp4", "int4", "int8", "mxfp4" or "e4m3"
    group_size: int | None = None  # columns that share a scale; None if a whole row does
    block_rows: int | None = None  # rows that share a scale; None if each has its own, or the matrix has one
    symmetric: bool = True  # otherwise each group has a zero point
    reordered: bool = False  # groups interleave, and the file has each column's group
    zero_offset: int = 0  # added to the file's zero points
    ignored: tuple[str, ...] = ()  # modules stored as floats, with their submodules

    @property
    def title(self) -> str:
        """Description for messages, such as "GPTQ int4, groups of 128, with zero points"."""
        columns = self.group_size
        groups = f", blocks of {self.block_rows} x {columns}" if self.block_rows else f", groups of {columns}"
        zeros, order = "" if self.symmetric else ", with zero points", ", reordered" if self.reordered else ""
        return f"{METHODS[self.method]} {self.values}{groups if columns else ''}{zeros}{order}"

    @property
    def is_wide(self) -> bool:
        """Whether the format's values need 8 bits."""
        return self.values in ("int8", "e4m3")

    def ignores(self, name: str) -> bool:
        """Return whether config.json says that tensor `name` is stored as floats. Patterns are not evaluated."""
        return any(name.startswith(f"{module}.") for module in self.ignored)


def saved_format_from_hf(config: Mapping[str, Any], where: str) -> SavedFormat | None:
    """Return the format, None for floats. `where` names the configuration in errors. Raises ModelError."""
    fields = Fields(config, where)
    if fields.get("quantization_config") is None:
        return None
    section = fields.section("quantization_config")
    is_older = section.flag("load_in_4bit", False) or section.flag("load_in_8bit", False)
    method = section.text("quant_method", BITSANDBYTES if is_older else "unknown")
    if method not in _READERS:
        raise section.fail(f"quantization by {shown(method)} is not supported; {ADVICE}.")
    return _READERS[method](section)


def _bitsandbytes(section: Fields) -> SavedFormat:
    in_4_bits, in_8_bits = section.flag("load_in_4bit", False), section.flag("load_in_8bit", False)
    if in_8_bits or not in_4_bits:
        found = "load_in_8bit" if in_8_bits else "neither load_in_4bit nor load_in_8bit"
        raise section.fail(f"bitsandbytes with {found} is not supported; {ADVICE}.")
    kind = section.text("bnb_4bit_quant_type", "fp4")  # bitsandbytes' own default
    if kind not in FOUR_BIT_TYPES:
        raise section.fail(f"bnb_4bit_quant_type is {shown(kind)}, expected {' or '.join(FOUR_BIT_TYPES)}.")
    return SavedFormat(BITSANDBYTES, kind)


def _gptq(section: Fields) -> SavedFormat:
    kind = section.text("checkpoint_format", section.text("format", "gptq"))
    if section.flag("is_marlin_format", False):
        kind = "marlin"
    if kind not in ("gptq", "gptq_v2"):
        raise _unsupported(section, f"GPTQ packed as {shown(kind)}", "a copy in checkpoint_format gptq or gptq_v2")
    _require(section, "pack_dtype", "int32")
    _refuse_overrides(section)
    bits, symmetric = _bits(section, "GPTQ", (4, 8)), section.flag("sym", True)
    static = section.flag("static_groups", False) or section.section("meta").flag("static_groups", False)
    group_size = _group_size(section)
    return SavedFormat(
        GPTQ,
        f"int{bits}",
        group_size,
        symmetric=symmetric,
        reordered=section.flag("desc_act", False) and group_size is not None and not static,
        zero_offset=int(kind == "gptq"),
        ignored=_ignored(section, "modules_to_not_convert"),
    )


def _awq(section: Fields) -> SavedFormat:
    kind = section.text("version", section.text("checkpoint_format", section.text("format", "gemm")))
    if kind.lower() != "gemm":
        raise _unsupported(section, f"AWQ packed as {shown(kind)}", "a copy in version gemm")
    if not section.flag("zero_point", True):
        raise _unsupported(section, "AWQ without zero_point", "a copy with zero_point true")
    bits, ignored = _bits(section, "AWQ", (4,)), _ignored(section, "modules_to_not_convert")
    return SavedFormat(AWQ, f"int{bits}", _group_size(section), symmetric=False, ignored=ignored)


def _compressed_tensors(section: Fields) -> SavedFormat:
    kind = section.text("format", "none named")
    if kind not in _COMPRESSED:
        known = ", ".join(_COMPRESSED)
        raise _unsupported(section, f"compressed-tensors in format {shown(kind)}", f"a copy in one of {known}")
    _require(section, "quantization_status", "compressed", "frozen")
    sparsity = section.section("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise _unsupported(section, f"compressed-tensors with sparsity {shown(sparsity)}", "a dense copy")
    if section.section("transform_config").get("config_groups"):
        raise _unsupported(section, "compressed-tensors with transform_config", "a copy without transforms")
    weights = _only_weights(section)
    bits, number = weights.integer("num_bits", 8, 1, 32), weights.text("type", "int")
    values = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "e4m3", ("float", 4): "mxfp4"}.get((number, bits))
    if values is None or values not in _COMPRESSED[kind]:
        found = f"compressed-tensors in format {kind} with {bits} bits of type {shown(number)}"
        raise _unsupported(section, found, f"a copy in {' or '.join(_COMPRESSED[kind])}")
    rows, columns = _compressed_groups(weights, values)
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise weights.fail(f"actorder is {shown(order)}, expected group or weight.")
    reordered, symmetric = order in (True, "group", "dynamic"), weights.flag("symmetric", True)
    if not symmetric and values not in ("int4", "int8"):
        raise _unsupported(section, f"{values} with zero points", "a symmetric copy")
    ignored = _ignored(section, "ignore")
    return SavedFormat(COMPRESSED_TENSORS, values, columns, rows, symmetric, reordered, ignored=ignored)


# A checkpoint's format -> types that its weights may have.
_COMPRESSED = {
    "pack-quantized": ("int4", "int8"),
    "int-quantized": ("int8",),
    "float-quantized": ("e4m3",),
    "naive-quantized": ("int8", "e4m3"),
    "mxfp4-pack-quantized": ("mxfp4",),
}


def _only_weights(section: Fields) -> Fields:
    """Return the settings of weights, which must be the same for all groups of modules."""
    groups = section.section("config_groups")
    names = groups.names()
    if not names:
        raise section.fail("config_groups is empty, expected the modules that are quantized.")
    found = [groups.section(name).get("weights") for name in names]
    if any(each != found[0] for each in found):
        raise _unsupported(section, "compressed-tensors with different groups of modules", "a copy in one precision")
    return groups.section(names[0]).section("weights")


def _compressed_groups(weights: Fields, values: str) -> tuple[int | None, int | None]:
    """Return the number of rows and of columns that share a scale; see SavedFormat for None."""
    strategy = weights.text("strategy", "tensor" if weights.get("group_size") is None else "group")
    if strategy == "group" or (values == "mxfp4" and strategy == "tensor_group"):
        columns = _group_size(weights)
        if values == "mxfp4" and columns != GROUP_COLUMNS:
            raise weights.fail(f"group_size is {shown(columns)}, expected {GROUP_COLUMNS} of mxfp4.")
        if values != "e4m3":
            return None, columns
    if strategy == "block" and values == "e4m3":
        return _block(weights, "block_structure")
    if strategy in ("channel", "tensor") and values != "mxfp4":
        return None, None
    raise weights.fail(f"strategy {shown(strategy)} is not supported for {values}; give a copy with another one.")


def _fp8(section: Fields) -> SavedFormat:
    rows, columns = (None, None) if section.get("weight_block_size") is None else _block(section, "weight_block_size")
    _require(section, "scale_fmt", "float", "ue8m0")
    return SavedFormat(FP8, "e4m3", columns, rows, ignored=_ignored(section, "modules_to_not_convert"))


_READERS: dict[str, Callable[[Fields], SavedFormat]] = {
    BITSANDBYTES: _bitsandbytes,
    GPTQ: _gptq,
    AWQ: _awq,
    COMPRESSED_TENSORS: _compressed_tensors,
    FP8: _fp8,
    MXFP4: lambda section: SavedFormat(MXFP4, "mxfp4", GROUP_COLUMNS),
}


def _bits(section: Fields, name: str, supported: tuple[int, ...]) -> int:
    bits = section.integer("bits", None, 1, 32)
    if bits not in supported:
        raise _unsupported(section, f"{name} in {bits} bits", f"a copy in {' or '.join(map(str, supported))} bits")
    return bits


def _group_size(section: Fields) -> int | None:
    """Return the number of columns per group; None if the file says -1, which means a whole row."""
    size = section.integer("group_size", 128, -1)
    if size != -1 and (size < 1 or size % GROUP_COLUMNS):
        raise section.fail(f"group_size is {size}, expected -1 or a multiple of {GROUP_COLUMNS}; {ADVICE}.")
    return None if size == -1 else size


def _block(section: Fields, name: str) -> tuple[int, int]:
    """Return the number of rows and of columns of a block."""
    value = section.get(name)
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
        raise section.fail(f"{name} is {shown(value)}, expected two sizes, of rows and columns.")
    return sizes[0], sizes[1]


def _ignored(section: Fields, name: str) -> tuple[str, ...]:
    value = section.get(name, [])
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise section.fail(f"{name} is {shown(value)}, expected a list of modules.")
    return tuple(each for each in value if not each.startswith(MARKED_PATTERN))


def _refuse_overrides(section: Fields) -> None:
    """Refuse GPTQModel's other widths of single modules. Those marked -: are not quantized, as their tensors show."""
    overrides = [name for name in section.section("dynamic").names() if not name.startswith("-:")]
    if overrides:
        raise _unsupported(section, f"GPTQ with other bits for {shown(overrides[0])} (dynamic)", "a uniform copy")


def _require(section: Fields, name: str, *known: str) -> None:
    """Check that an optional field has one of the known values. Raises ModelError."""
    value = section.text(name, known[0])
    if value not in known:
        raise section.fail(f"{name} is {shown(value)}, expected {' or '.join(known)}.")


def _unsupported(section: Fields, what: str, instead: str) -> ModelError:
    return section.fail(f"{what} is not supported; give {instead}, or the original weights.")
