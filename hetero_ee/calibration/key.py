"""Which model a calibration belongs to: checksums of its weights and everything that gives them their meaning."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.config_file import read_config_file
from hetero_ee.hub.regular_file import reason_of
from hetero_ee.weights.checkpoint import weight_files
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import QUANTIZER_VERSION
from hetero_ee.weights.store.manifest import FORMAT_VERSION, Manifest


def store_key(manifest: Manifest) -> str:
    """Of a store: its manifest without where it came from, so that the same weights made again have the same key."""
    values = asdict(manifest)
    del values["source"]
    return _digest(["store", FORMAT_VERSION, values])


def checkpoint_key(folder: Path, quantization: Quantization) -> str:
    """Of every store that this quantization makes of the checkpoint in `folder`. Reads its weight files whole.

    For calibrations that travel with a checkpoint: processors without AVX2 round a few codes of a store otherwise.
    Raises CheckpointError.
    """
    sums = {}
    for file in weight_files(folder):
        try:
            with file.open("rb") as opened:
                sums[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file} can't be read ({reason_of(error)}).") from error
    return _digest(["checkpoint", QUANTIZER_VERSION, asdict(quantization), read_config_file(folder), sums])


def _digest(identity: object) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
