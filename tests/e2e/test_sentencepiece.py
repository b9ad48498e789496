"""Folders whose tokenizer is tokenizer.model alone: token for token what transformers makes of it, or one sentence."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from hetero_ee import Engine, ModelError
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.store.library import make_store
from tests.bad_models import check_refusal, sparse
from tests.character_maps import character_map
from tests.families import config_of

ROOT = Path(__file__).parents[2]
MODEL, OTHERS = "tokenizer.model", ("tokenizer.json", "tokenizer_config.json")
ODD = "Héllo wörld\u00a0 x\n\n\ttabs  two  spaces 日本語 😀 \u200b e\u0301 ﬁ ½ <s> </s> [INST] a\0b \r\n end "
NEEDED = "not installed; they come with the extra sentencepiece"
LLAMA: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
TOKEN = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": True, "rstrip": False}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "without settings": None,
    "Llama": LLAMA,
    "Llama, not legacy": LLAMA | {"legacy": False},
    "Llama, with tokens": LLAMA | {"bos_token": TOKEN, "pad_token": "</s>"},
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bpe.model and unigram.model, of 600 pieces."""
    spm = pytest.importorskip("sentencepiece", reason=NEEDED)
    pytest.importorskip("google.protobuf", reason=NEEDED)
    folder = tmp_path_factory.mktemp("sentencepiece")
    for kind in ("bpe", "unigram"):
        spm.SentencePieceTrainer.train(
            input=str(ROOT / "docs/DECISIONS.md"),
            model_prefix=str(folder / kind),
            model_type=kind,
            vocab_size=600,
            byte_fallback=True,
            minloglevel=2,
        )
    return folder


@pytest.fixture
def folder(own_tiny: Path) -> Path:
    """A model without any tokenizer."""
    for name in OTHERS:
        (own_tiny / name).unlink()
    return own_tiny


def proto() -> Any:
    """A small model of sentencepiece to spoil."""
    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason=NEEDED)
    made = pb.ModelProto()
    made.trainer_spec.model_type = 2
    for piece in ("<unk>", "<s>", "</s>", "a", "b", "ab"):
        made.pieces.add(piece=piece, score=-len(made.pieces))
    return made


@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "phi3", "opt"])
def test_tokens_are_those_of_transformers(trained: Path, family: str, kind: str, settings: str, tmp_path: Path) -> None:
    config_of(family, vocab_size=700).save_pretrained(tmp_path)
    (tmp_path / MODEL).write_bytes((trained / f"{kind}.model").read_bytes())
    if (values := CONFIGS[settings]) is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path, 700)
    for text in (ODD, "", "Once upon a time", " a", "ab" * 100):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id


def test_such_a_model_opens_from_its_folder_and_as_a_store(trained: Path, folder: Path, cache: Path) -> None:
    (folder / MODEL).write_bytes((trained / "bpe.model").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    store = make_store(folder, cache=cache, quantizer="rtn")
    texts = []
    for place in (folder, store):
        with Engine.from_pretrained(place, quantizer="rtn", threads=1) as engine:
            texts.append(engine.generate("Once upon a time", max_new_tokens=8).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("module", ["sentencepiece", "google.protobuf"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    folder: Path, cache: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / MODEL).write_bytes(b"\x0a\x03\x0a\x01a")
    for name in [name for name in sys.modules if name.split(".")[0] in ("sentencepiece", "google")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    check_refusal(folder, cache, ModelError, 'run pip install "hetero-ee[sentencepiece]", or put')


def test_tokenizer_json_needs_no_package_beside_a_sentencepiece_model(
    own_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_tiny / MODEL).write_bytes(b"nobody reads this")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert Tokenizer.load(own_tiny, 2048).encode("Once upon a time")


NO_MODEL: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is damaged or not a sentencepiece model"),
    "zeros": (bytes(500), "is damaged or not a sentencepiece model"),
    "a vocabulary of tiktoken": (b"IQ== 0\nIg== 1\n", "is damaged or not a sentencepiece model"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is damaged or not a sentencepiece model"),
    "cut": (b"\x0a\x03\x0a\x01a" * 50 + b"\x0a\x70a", "is damaged or not a sentencepiece model"),
    "two million empty pieces": (b"\x0a\x00" * 2 * 10**6, "has 2000000 pieces, expected at most 1048576"),
}


@pytest.mark.parametrize("name", NO_MODEL)
def test_what_is_no_model_is_refused(folder: Path, cache: Path, name: str) -> None:
    proto()  # or skips
    data, words = NO_MODEL[name]
    (folder / MODEL).write_bytes(data)
    check_refusal(folder, cache, ModelError, words)


def test_an_enormous_model_is_refused_unread(folder: Path, cache: Path) -> None:
    for n_bytes in (17 * 2**20, 2**40):
        sparse(MODEL, n_bytes)(folder)
        check_refusal(folder, cache, ModelError, f"{MODEL} has {n_bytes} bytes")


def user_defined(made: Any) -> None:
    for number in range(10_001):
        made.pieces.add(piece=f"<{number}>", type=4)


def long_pieces(made: Any) -> None:
    for length in range(1, 600):
        made.pieces.add(piece="x" * length)


def novels(made: Any) -> None:
    made.normalizer_spec.precompiled_charsmap = character_map({"a": "x" * 5000})


def damaged_map(made: Any) -> None:
    made.normalizer_spec.precompiled_charsmap = b"\xff\xff\xff\x7f"


SPOILT = {
    user_defined: "has 10001 control and user-defined pieces, expected at most 10000",
    long_pieces: "as the sum of its pieces' squared lengths, expected at most 50000000",
    novels: "could turn one byte into more than 1000",
    damaged_map: "can't be",
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_hostile_model_is_refused(folder: Path, cache: Path, spoil: Any) -> None:
    made = proto()
    spoil(made)
    (folder / MODEL).write_bytes(made.SerializeToString())
    check_refusal(folder, cache, ModelError, SPOILT[spoil])
