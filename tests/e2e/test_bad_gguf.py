"""GGUF files whose header is well-formed and whose content is not: one typed error of one line, nothing left behind."""

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import HeteroError
from hetero_ee.config import demo_model_folder
from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.hub.gguf.header import read_gguf_header
from hetero_ee.hub.gguf.tokenizer import tokenizer_files
from hetero_ee.hub.resolve import resolve_model
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.source import Source
from tests.families import random_model
from tests.gguf_files import described, entry, gguf_bytes
from tests.gguf_models import write_gguf

gguf = pytest.importorskip("gguf")
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
MAX_LENGTH = 700  # of an error


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("good") / "good.gguf"
    sizes = SIZES | {"vocab_size": read_spec(demo_model_folder()).vocab_size}
    write_gguf(random_model("llama", **sizes), file, lambda _: "Q4_0", tokenizer=demo_model_folder())
    return file


def opened(file: Path, folder: Path) -> None:
    """All that opening does with a file's content, but running it."""
    its = gguf_folder(file)
    spec = read_spec(its)
    Tokenizer.load(its, spec.vocab_size).encode("Once upon a time")
    convert(its, spec, folder / "store", Quantization.of_model(its, None))


def refusal(file: Path, folder: Path) -> HeteroError | None:
    try:
        opened(file, folder)
    except HeteroError as error:
        message = str(error)
        assert message.isprintable() and message.endswith(".") and len(message) < MAX_LENGTH, message
        assert not (folder / "store").exists()
        return error
    return None


def metadata(**changes: Any) -> Callable[[Path, Path], None]:
    """The good file with these entries (`__` for a dot) as the gguf package writes them; None leaves one out."""

    def write(good: Path, file: Path) -> None:
        values = dict(read_gguf_header(good).metadata) | {key.replace("__", "."): v for key, v in changes.items()}
        rewrite(good, file, {key: value for key, value in values.items() if value is not None})

    return write


def without(name: str, instead: str | None = None) -> Callable[[Path, Path], None]:
    """The good file without a tensor, or with it under another name."""

    def write(good: Path, file: Path) -> None:
        rewrite(good, file, dict(read_gguf_header(good).metadata), {name: instead})

    return write


def rewrite(good: Path, file: Path, values: dict[str, Any], renamed: dict[str, str | None] | None = None) -> None:
    """The file of other metadata, or of tensors with other names; None leaves one out."""
    header, data = read_gguf_header(good), good.read_bytes()
    tensors, body = [], b""
    for tensor in header.tensors.values():
        name = (renamed or {}).get(tensor.name, tensor.name)
        if name is not None:
            number = gguf.GGMLQuantizationType[tensor.type.name]
            tensors.append(described(name, tuple(reversed(tensor.shape)), number, len(body)))
            body += data[tensor.start : tensor.start + tensor.n_bytes]
            body += bytes(-len(body) % 32)
    file.write_bytes(gguf_bytes([encoded(key, value) for key, value in values.items()], tensors, body))


def encoded(key: str, value: Any) -> bytes:
    if isinstance(value, list) and value and type(value[0]) is int:
        return entry(key, struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value))
    if isinstance(value, bool):
        return entry(key, ("bool", value))
    return entry(key, value if isinstance(value, str | list | bytes) else (_kind(value), value))


def _kind(value: float) -> str:
    return "f32" if isinstance(value, float) else "u32" if 0 <= value < 2**32 else "u64"


def scale_of(name: str, bits: int) -> Callable[[Path, Path], None]:
    """The good file with these bits as the first scale of a tensor."""

    def write(good: Path, file: Path) -> None:
        data, tensor = bytearray(good.read_bytes()), read_gguf_header(good).tensors[name]
        data[tensor.start : tensor.start + 2] = struct.pack("<H", bits)
        file.write_bytes(data)

    return write


LAYER = "blk.0.ffn_down.weight"
BAD: dict[str, tuple[Callable[[Path, Path], None], type[HeteroError], str]] = {
    "no architecture": (metadata(general__architecture=None), ModelError, "'none named' is not supported"),
    "architecture unknown": (metadata(general__architecture="gpt2"), ModelError, "'gpt2' is not supported in GGUF"),
    "architecture a number": (metadata(general__architecture=7), ModelError, "not supported"),
    "an ESC in it": (metadata(general__architecture="\x1b[2J"), ModelError, "not supported"),
    "experts": (metadata(llama__expert_count=8), ModelError, "mixture of 8 experts"),
    "no layer count": (metadata(llama__block_count=None), ModelError, "llama.block_count is missing"),
    "layers 2^32": (metadata(llama__block_count=2**32 - 1), ModelError, "num_hidden_layers"),
    "layers 2": (metadata(llama__block_count=2), CheckpointError, "lacks tensors"),
    "layers a text": (metadata(llama__block_count="1"), ModelError, "num_hidden_layers is '1'"),
    "width 0": (metadata(llama__embedding_length=0), ModelError, "hidden_size is 0"),
    "width 2^63": (metadata(llama__embedding_length=2**63), ModelError, "hidden_size"),
    "width another": (metadata(llama__embedding_length=64), CheckpointError, "does not fit its own metadata"),
    "heads 0": (metadata(llama__attention__head_count=0), ModelError, "num_attention_heads"),
    "heads unlike": (metadata(llama__attention__head_count=[2, 4]), ModelError, "differs from layer to layer"),
    "no heads": (metadata(llama__attention__head_count=[]), ModelError, "differs from layer to layer"),
    "values unlike keys": (metadata(llama__attention__value_length=8), ModelError, "unlike queries and keys"),
    "part of a head turns": (metadata(llama__rope__dimension_count=8), ModelError, "expected all"),
    "epsilon NaN": (metadata(llama__attention__layer_norm_rms_epsilon=float("nan")), ModelError, "rms_norm_eps"),
    "theta infinite": (metadata(llama__rope__freq_base=float("inf")), ModelError, "rope_theta"),
    "theta a list": (metadata(llama__rope__freq_base=[1.0]), ModelError, "rope_theta"),
    "rope unknown": (metadata(llama__rope__scaling__type="su"), ModelError, "rope.scaling.type is 'su'"),
    "yarn of 10^30": (
        metadata(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=1e30),
        ModelError,
        "factor is 1",
    ),
    "no embedding": (without("token_embd.weight"), ModelError, "token_embd.weight is missing"),
    "no norm": (without("output_norm.weight"), CheckpointError, "lacks tensors: output_norm.weight"),
    "a tensor more": (without(LAYER, "blk.0.ffn_other.weight"), CheckpointError, "lacks tensors"),
    "scale NaN": (scale_of(LAYER, 0x7E00), CheckpointError, "nan at"),
    "scale infinite": (scale_of(LAYER, 0xFC00), CheckpointError, "-inf at"),
    "embedding NaN": (scale_of("token_embd.weight", 0x7E01), CheckpointError, "nan at"),
    "tokenizer none": (metadata(tokenizer__ggml__model=None), ModelError, "tokenizer is of kind None"),
    "tokenizer unknown": (metadata(tokenizer__ggml__model="rwkv"), ModelError, "of kind 'rwkv'"),
    "split unknown": (metadata(tokenizer__ggml__pre="viking"), ModelError, "'viking' (tokenizer.ggml.pre)"),
    "split missing": (metadata(tokenizer__ggml__pre=None), ModelError, "text by None"),
    "tokens none": (metadata(tokenizer__ggml__tokens=None), ModelError, "tokenizer.ggml.tokens is None"),
    "tokens numbers": (metadata(tokenizer__ggml__tokens=[1.0, 2.0]), ModelError, "expected a list of str"),
    "types too few": (metadata(tokenizer__ggml__token_type=[1, 1]), ModelError, "and types of 2"),
    "merge of three": (metadata(tokenizer__ggml__merges=["a b c"]), ModelError, "not of two pieces"),
    "merge of strangers": (metadata(tokenizer__ggml__merges=["zzzz qqqq"]), ModelError, "tokenizer can't be made"),
    "end beyond": (metadata(tokenizer__ggml__eos_token_id=10**6), ModelError, "eos_token_id is 1000000"),
    "begin a text": (metadata(tokenizer__ggml__bos_token_id="0"), ModelError, "bos_token_id is '0'"),
    "all are added": (
        metadata(tokenizer__ggml__tokens=["x"] * 30_000, tokenizer__ggml__token_type=[4] * 30_000),
        ModelError,
        "30000 control and user-defined tokens",
    ),
    "pieces of any length": (
        metadata(
            tokenizer__ggml__model="llama",
            tokenizer__ggml__tokens=["x" * 10_000],
            tokenizer__ggml__token_type=[1],
            tokenizer__ggml__scores=[0.0],
            tokenizer__ggml__merges=None,
            tokenizer__ggml__bos_token_id=0,
            tokenizer__ggml__eos_token_id=0,
        ),
        ModelError,
        "squared lengths",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_content_is_refused(good: Path, tmp_path: Path, case: str) -> None:
    write, error, words = BAD[case]
    write(good, tmp_path / "bad.gguf")
    found = refusal(tmp_path / "bad.gguf", tmp_path)
    assert found is not None and type(found) is error and words in str(found), found


def test_the_good_one_opens(good: Path, tmp_path: Path) -> None:
    metadata()(good, tmp_path / "same.gguf")
    assert refusal(tmp_path / "same.gguf", tmp_path) is None


def test_flipped_bytes_anywhere(good: Path, tmp_path: Path) -> None:
    """Each file opens or is refused; 40 here, more where time is no matter."""
    assert 0 < flips(good, tmp_path, range(40)) <= 40


@pytest.mark.slow
def test_more_flipped_bytes_anywhere(good: Path, tmp_path: Path) -> None:
    flips(good, tmp_path, range(40, 3000))


def flips(good: Path, folder: Path, seeds: range) -> int:
    """How many of the files were refused."""
    before, n_refused = good.read_bytes(), 0
    n_header = min(tensor.start for tensor in read_gguf_header(good).tensors.values())
    for seed in seeds:
        rng, data = random.Random(seed), bytearray(before)
        for _ in range(rng.choice((1, 4, 64))):
            reach = rng.choice((2000, n_header, len(data)))  # sizes lie at the beginning, in front of the vocabulary
            data[rng.randrange(reach)] = rng.randrange(256)
        (folder / "m.gguf").write_bytes(data)
        n_refused += refusal(folder / "m.gguf", folder) is not None
        shutil.rmtree(folder / "store", ignore_errors=True)
    return n_refused


def test_a_file_that_changes_is_noticed(good: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(good, tmp_path / "m.gguf"))
    its = gguf_folder(file)
    with file.open("ab") as opened_file:
        opened_file.write(bytes(32))
    with pytest.raises(CheckpointError, match="has changed since it was translated"):
        open_checkpoint(its, read_spec(its))
    assert gguf_folder(file) != its
    file.unlink()
    with pytest.raises(CheckpointError, match="can't be read"):
        open_checkpoint(its, read_spec(its))


def test_what_another_process_translates_meanwhile_is_left_alone(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before = Path(shutil.copy(good, tmp_path / "m.gguf")), list[Source]()

    def meanwhile(header: Any) -> dict[str, str]:
        monkeypatch.undo()
        before.append(Source.of(gguf_folder(file)))
        return tokenizer_files(header)

    monkeypatch.setattr("hetero_ee.hub.gguf.folder.tokenizer_files", meanwhile)
    gguf_folder(file)
    before[0].check_unchanged()


def test_the_note_counts_in_the_cache_alone(good: Path, tmp_path: Path) -> None:
    """A folder from elsewhere must not make the engine read any file that it names."""
    shutil.copytree(gguf_folder(good), tmp_path / "copy")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path / "copy", read_spec(tmp_path / "copy"))


def test_values_that_8_bits_lack_are_quantized_anew(tmp_path: Path) -> None:
    """-128, which llama.cpp never writes."""
    write_gguf(random_model("llama", **(SIZES | {"vocab_size": 64})), tmp_path / "m.gguf", lambda _: "Q8_0")
    data, tensor = bytearray((tmp_path / "m.gguf").read_bytes()), read_gguf_header(tmp_path / "m.gguf").tensors[LAYER]
    data[tensor.start + 2] = 0x80
    (tmp_path / "other.gguf").write_bytes(data)
    its = gguf_folder(tmp_path / "other.gguf", configuration_only=True)
    checkpoint = open_checkpoint(its, read_spec(its))
    assert checkpoint.tiles("layers.0.ffn.down") is None
    assert checkpoint.tiles("layers.0.attention.qkv") is not None


def test_a_folder_of_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match="give that file"):
        read_spec(resolve_model(tmp_path))
