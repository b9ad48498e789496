"""Divide a sparse FFN's neurons into sections, which the kernels add up from the last to the first.

The fixed order makes the sum bit-equal however the sections are divided between two devices.
"""

BLOCK, MAX_SECTIONS = 128, 32  # neurons of a block, and sections of an FFN, as the kernels have them


def section_neurons(n_neurons: int) -> int:
    """Return the number of neurons per section, whole blocks; the last section may have fewer."""
    return -(-n_neurons // (BLOCK * MAX_SECTIONS)) * BLOCK
