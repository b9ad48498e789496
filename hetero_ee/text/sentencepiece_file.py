"""Check tokenizer.model, sentencepiece's vocabulary, before transformers converts it to a tokenizer."""

from importlib import import_module
from pathlib import Path
from typing import Any

from hetero_ee.errors import ModelError
from hetero_ee.hub.regular_file import find_file, read_file

MODEL_FILE = "tokenizer.model"
MAX_MODEL_BYTES = 16 * 2**20  # the largest published ones have 5 MB; a hostile one needs 30 times its size in memory
MAX_PIECES = 2**20  # the largest published vocabularies have 2^18
# Pieces that are added one by one, which needs time quadratic in their number: 4 s for this many. Gemma has 6,400.
MAX_ADDED_PIECES = 10_000
CONTROL, USER_DEFINED = 3, 4
# Each cut of a piece may be a merge, of two strings as long as the piece: the sum of squared lengths. Gemma's is
# about 2 * 10^7; ten times the limit needs 10 s and 2 GB.
MAX_CUTS = 5 * 10**7


def check_sentencepiece(folder: Path) -> None:
    """Check that tokenizer.model can be converted safely, unless tokenizer.json is used instead. Raises ModelError."""
    file = find_file(folder, MODEL_FILE)
    if file is None or find_file(folder, "tokenizer.json"):
        return
    data = read_file(file, MAX_MODEL_BYTES, "a sentencepiece model")
    try:
        protocol: Any = import_module("sentencepiece.sentencepiece_model_pb2")  # which imports protobuf
    except ImportError as error:
        raise ModelError(
            f"{folder} has its tokenizer only as {MODEL_FILE}, which needs two more packages; "
            'run pip install "hetero-ee[sentencepiece]", or put the model\'s tokenizer.json there.'
        ) from error
    model = protocol.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:  # DecodeError, of any implementation of protobuf
        model.Clear()
    if not model.pieces:
        raise ModelError(f"{file} is damaged or not a sentencepiece model; get the file again.")
    lengths = [len(piece.piece) for piece in model.pieces]
    n_added = sum(piece.type in (CONTROL, USER_DEFINED) for piece in model.pieces)
    for found, most, what in (
        (len(lengths), MAX_PIECES, "pieces"),
        (n_added, MAX_ADDED_PIECES, "control and user-defined pieces"),
        (sum(length**2 for length in lengths), MAX_CUTS, "as the sum of its pieces' squared lengths"),
    ):
        if found > most:
            raise ModelError(f"{file} has {found} {what}, expected at most {most}.")
