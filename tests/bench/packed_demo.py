"""Writes the demo model in other people's formats, for scripts/measure_quality.py --also.

    PYTHONPATH=. python tests/bench/packed_demo.py FOLDER

GGUF files by llama.cpp's quantizer; GPTQ-like, AWQ-like, compressed-tensors and FP8 checkpoints by the tests' packers,
which round to nearest: the formats, without the calibration that GPTQ and AWQ are named for.
"""

import argparse
import shutil
from pathlib import Path

import torch

from hetero_ee.config import demo_model_folder
from tests.bench.bench_gguf import files
from tests.packed_files import Packing, pack_checkpoint

PACKINGS = {
    "gptq-like-128": Packing(method="gptq", group_size=128),
    "gptq-like-128-reordered": Packing(method="gptq", group_size=128, reordered=True),
    "awq-like-128": Packing(method="awq", symmetric=False, group_size=128),
    "mxfp4": Packing(method="mxfp4-pack-quantized"),
    "fp8-128x128": Packing(method="fp8", by="fp8", block=(128, 128), scale_type=torch.float32),
}
GGUF_TYPES = ["Q4_0", "Q4_K_M", "Q8_0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    list(files(demo_model_folder(), GGUF_TYPES, folder))
    for name, packing in PACKINGS.items():
        target = Path(shutil.copytree(demo_model_folder(), folder / name, dirs_exist_ok=True))
        pack_checkpoint(target, packing)


if __name__ == "__main__":
    main()
