"""Value types of the KV cache and their bytes."""

from hetero_ee.weights.model_weights import UNQUANTIZED

KV_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}  # of one value
KV_SCALE_BYTES = {"fp32": 0, "fp16": 0, "int8": 4}  # of one position and head
KV_TYPE = "fp16"  # unless the user chooses another; see default_kv_type


def default_kv_type(quantizer: str | None) -> str:
    """Return the type for weights made by this quantizer. Unquantized models are references, so nothing is rounded."""
    return "fp32" if quantizer == UNQUANTIZED else KV_TYPE


def kv_bytes_per_token(n_kv_heads: int, head_dim: int, kv_type: str) -> int:
    """Return the bytes of one position's keys and values in one layer."""
    return 2 * n_kv_heads * (head_dim * KV_BYTES[kv_type] + KV_SCALE_BYTES[kv_type])
