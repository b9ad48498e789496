"""Find a checkpoint's quantized matrices and check that config.json describes them."""

from collections.abc import Mapping

from torch import Tensor

from hetero_ee.errors import CheckpointError
from hetero_ee.models.hf_config import DOWN
from hetero_ee.models.hf_names import BLOCKS, Part
from hetero_ee.models.saved_format import AWQ, BITSANDBYTES, GPTQ, MXFP4, SavedFormat
from hetero_ee.weights.formats import awq, compressed_tensors, fp8, gptq
from hetero_ee.weights.formats.bitsandbytes_4bit import FourBitMatrix, four_bit_matrix
from hetero_ee.weights.formats.grouped_matrix import GroupedMatrix
from hetero_ee.weights.formats.saved_matrix import RawTensors, SavedMatrix

# Tensors with scales for activations, keys and values in 8 bits, which this engine does not use.
IGNORED_SUFFIXES = (".input_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")
MARKS = {
    gptq.MARK: "was packed by GPTQ or AWQ",
    compressed_tensors.PACKED: "was packed by compressed-tensors",
    BLOCKS: "was packed in MXFP4",
    **dict.fromkeys(fp8.SCALES, "belongs to weights in 8 bits"),
}
OTHER_CONFIG = "get config.json of the same model"
NO_FORMAT = "that the weights are not quantized (no quantization_config)"


def saved_matrices(
    tensors: RawTensors, parts_of: Mapping[str, list[Part]], said: SavedFormat | None
) -> dict[str, SavedMatrix]:
    """Return the checkpoint's quantized matrices by their Hugging Face names.

    Args:
        parts_of: the checkpoint's tensors that each of this engine's tensors consists of, by this engine's names.
        said: the format that config.json states, None for floats.

    Raises:
        CheckpointError: if config.json and the tensors disagree.
    """
    found: dict[str, SavedMatrix] = {}
    parts = ((name, part) for name, its_parts in parts_of.items() for part in its_parts)
    for name, part in parts:
        if len(part.stored_shape) != 2:
            continue
        in_order = said is not None and said.reordered and name.endswith(DOWN)
        if matrix := _bitsandbytes(tensors, part, said) or _other(tensors, part, said, in_order=in_order):
            if said and said.ignores(part.hf_name):
                raise CheckpointError(
                    f"{tensors.folder}: tensor {part.hf_name} is in {said.title}, and config.json says that it is not; "
                    f"{OTHER_CONFIG}."
                )
            found[part.hf_name] = matrix
    if said and not found:
        raise CheckpointError(
            f"{tensors.folder}: config.json says that the weights are in {said.title}, and they are not; "
            f"{OTHER_CONFIG}, or remove its quantization_config."
        )
    return found


def column_order(matrix: SavedMatrix) -> Tensor | None:
    """Return the order in which a matrix's columns are read; None if it is the file's."""
    return matrix.column_order() if isinstance(matrix, GroupedMatrix) else None


def _bitsandbytes(tensors: RawTensors, part: Part, said: SavedFormat | None) -> FourBitMatrix | None:
    matrix = four_bit_matrix(tensors, part.hf_name, _rows(part))
    if matrix and (said is None or matrix.state.quant_type != said.values):
        raise CheckpointError(
            f"{tensors.folder}: tensor {part.hf_name} was quantized to {matrix.state.quant_type}, config.json says "
            f"{said.values if said else NO_FORMAT}; {OTHER_CONFIG}."
        )
    return matrix


def _other(tensors: RawTensors, part: Part, said: SavedFormat | None, *, in_order: bool) -> SavedMatrix | None:
    """Return a matrix in the format of config.json; None for floats. Raises CheckpointError for another format."""
    module, shape = part.hf_name.removesuffix(".weight"), _rows(part)
    marks = [mark for mark in MARKS if module + mark in tensors.names]
    stored_type = tensors.header(part.hf_name)[0] if part.hf_name in tensors.names else None
    if said and said.method in (GPTQ, AWQ):
        if gptq.MARK in marks:
            kind = awq.AwqMatrix if said.method == AWQ else gptq.GptqMatrix
            return kind(module, shape, said, tensors, in_order)
    elif said and said.values == "e4m3":
        if stored_type in fp8.TYPES:
            return fp8.Fp8Matrix(module, shape, said, tensors)
    elif said and said.method == MXFP4:
        if module + BLOCKS in tensors.names:
            return compressed_tensors.Mxfp4Experts(module, shape, said, tensors, n_experts=part.n_experts)
    elif said and said.method != BITSANDBYTES:
        if said.values == "mxfp4" and compressed_tensors.PACKED in marks:
            return compressed_tensors.Mxfp4Matrix(module, shape, said, tensors)
        if compressed_tensors.PACKED in marks or stored_type == "I8":
            return compressed_tensors.CompressedMatrix(module, shape, said, tensors, in_order)
    if marks:
        mark = marks[0]
        raise CheckpointError(
            f"{tensors.folder}: tensor {module}{mark} {MARKS[mark]}, config.json says "
            f"{said.title if said else NO_FORMAT}; {OTHER_CONFIG}."
        )
    return None


def _rows(part: Part) -> tuple[int, int]:
    n_rows, n_columns = part.stored_shape
    return n_rows, n_columns
