"""The types of keys and values, and which one is used by default."""

from hetero_ee.weights.model_weights import UNQUANTIZED

KV_TYPE = "fp16"  # unless the user chooses another; see default_kv_type


def default_kv_type(quantizer: str | None) -> str:
    """Return the type for weights made by this quantizer. Unquantized models are references, so nothing is rounded."""
    return "fp32" if quantizer == UNQUANTIZED else KV_TYPE
