"""Define the types of keys and values, and choose the default one."""

from hetero_ee.options.engine import UNQUANTIZED

KV_TYPE = "fp16"  # unless the user chooses another; see default_kv_type


def default_kv_type(quantizer: str | None) -> str:
    """Return the default type for weights made by a quantizer. Unquantized models are references, kept in fp32."""
    return "fp32" if quantizer == UNQUANTIZED else KV_TYPE
