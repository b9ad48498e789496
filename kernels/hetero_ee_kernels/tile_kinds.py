"""Kinds of tile and of instructions, as the kernels' constants KIND and ISA say them. Free of Triton."""

LINEAR, CODEBOOK, BYTES = 0, 1, 2  # KIND: int4 of -8 .. 7, int4 of a codebook, int8
PLAIN, PTX, GCN = 0, 1, 2  # ISA, whose instructions a kernel may hold: nobody's, NVIDIA's, AMD's
