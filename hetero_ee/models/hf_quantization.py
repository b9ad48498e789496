"""What config.json says of weights that are quantized already: bitsandbytes' 4 bits can be read, others can't."""

from hetero_ee.errors import shown
from hetero_ee.models.fields import Fields

FOUR_BIT_TYPES = ("nf4", "fp4")
ADVICE = "give the original weights, or a copy that bitsandbytes saved in 4 bits"


def four_bit_type(fields: Fields) -> str | None:
    """Which 4 bits: "nf4" or "fp4" where bitsandbytes saved the weights in 4 bits, None where they are floats.

    fields: of the whole config.json. Raises ModelError for weights quantized in any other way.
    """
    if fields.get("quantization_config") is None:
        return None
    section = fields.section("quantization_config")
    in_4_bits, in_8_bits = section.flag("load_in_4bit", False), section.flag("load_in_8bit", False)
    method = section.text("quant_method", "bitsandbytes" if in_4_bits or in_8_bits else "unknown")
    if method != "bitsandbytes":
        raise section.fail(f"quantization by {shown(method)} is not supported; {ADVICE}.")
    if in_8_bits or not in_4_bits:
        found = "load_in_8bit" if in_8_bits else "neither load_in_4bit nor load_in_8bit"
        raise section.fail(f"bitsandbytes with {found} is not supported; {ADVICE}.")
    kind = section.text("bnb_4bit_quant_type", "fp4")  # bitsandbytes' own default
    if kind not in FOUR_BIT_TYPES:
        raise section.fail(f"bnb_4bit_quant_type is {shown(kind)}, expected {' or '.join(FOUR_BIT_TYPES)}.")
    return kind
