"""CPU operations, one operation a file, named and ordered like the GPU's. They see raw arrays and sizes only.

None is written yet: the engine computes with the torch reference in `hetero_ee.runtime.torch_ops`.
"""
