"""Streamed text: pieces joined are the whole text, characters stay whole, stop strings never show."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.hub.config_file import read_spec
from hetero_ee.text.text_stream import REPLACEMENT, TextStream
from hetero_ee.text.tokenizer import Tokenizer

SNIPPETS = [
    "Once upon a time",
    " there was",
    "  ",
    "\n",
    "\t\t",
    "x",
    " a, b. c!",
    "你好世界天地玄黃宇宙洪荒",  # three bytes each
    "🂡𐍈𝄞",  # four bytes each
    "👩‍👩‍👧‍👦",  # a family: four people and three joiners
    "👍🏽🇩🇪☀️",
    "é́̈ ñ",  # combining marks
    "שלום\u200f مرحبا",
    "\x00\x7f",
]
texts = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=4), max_size=12).map("".join)
SPECIAL = 256  # of the byte-level fake: a token without text


def decode_bytes(ids: list[int]) -> str:
    """A byte-level tokenizer with one token a byte, like every byte-level BPE at its worst."""
    return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def decode_byte_fallback(ids: list[int]) -> str:
    """Llama's way: a run of byte tokens is text only if all of it is UTF-8; words carry a leading space."""
    words = {300: " the", 301: " cat", 302: "s", 303: " "}
    text, run = "", b""
    for token in [*ids, None]:
        if token is not None and token < 256:
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += REPLACEMENT * len(run)
        text, run = text + words.get(token or 0, ""), b""
    return text.removeprefix(" ")


def streamed(decode: Callable[[list[int]], str], prompt: list[int], ids: list[int], *stop: str) -> list[str]:
    """The pieces, the last of them from finish()."""
    stream = TextStream(decode, prompt, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


def continuation(decode: Callable[[list[int]], str], prompt: list[int], ids: list[int]) -> str:
    """The text after the prompt's, decoded as a whole."""
    return decode(prompt + ids)[len(decode(prompt)) :]


@pytest.fixture(scope="module", params=["demo", "stories260k"])
def folder(request: pytest.FixtureRequest) -> Path:
    model: Path = request.getfixturevalue(request.param)
    return model


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, read_spec(folder).vocab_size)


def test_trained_tokenizers_stream_any_text(tokenizer: Tokenizer) -> None:
    generator = random.Random(1)
    for _ in range(150):
        text = "".join(generator.choices(SNIPPETS, k=generator.randrange(1, 25)))
        ids = tokenizer.encode("Hi: " + text)
        for n_prompt in (1, len(tokenizer.encode("Hi:"))):
            pieces = streamed(tokenizer.decode, ids[:n_prompt], ids[n_prompt:])
            assert "".join(pieces) == continuation(tokenizer.decode, ids[:n_prompt], ids[n_prompt:])
            assert not any(REPLACEMENT in piece for piece in pieces)


def test_trained_tokenizers_stream_random_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    has_byte_fallback = '"ByteFallback"' in (folder / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = list(range(read_spec(folder).vocab_size))
    if has_byte_fallback:  # a byte that does not fit makes earlier bytes, characters already, invalid
        vocabulary = [
            t for t in vocabulary if not tokenizer._backend.backend_tokenizer.id_to_token(t).startswith("<0x")
        ]
    generator = random.Random(2)
    for length in (1, 3, 40, 200):
        for _ in range(40):
            prompt = generator.choices(vocabulary, k=generator.randrange(1, 40))
            ids = generator.choices(vocabulary, k=length)
            assert "".join(streamed(tokenizer.decode, prompt, ids)) == continuation(tokenizer.decode, prompt, ids)


@given(text=texts, prompt=texts.filter(bool))
def test_characters_stay_whole(text: str, prompt: str) -> None:
    for decode in (decode_bytes, decode_byte_fallback):
        pieces = streamed(decode, list(prompt.encode()), list(text.encode()))
        assert "".join(pieces) == text
        assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@given(text=st.text(alphabet=st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_each_character_comes_with_its_last_byte(text: str) -> None:
    data = text.replace(REPLACEMENT, "").encode()
    stream, seen = TextStream(decode_bytes, list(b"prompt")), ""
    for n_bytes in range(1, len(data) + 1):
        seen += stream.add(data[n_bytes - 1])
        assert seen == data[:n_bytes].decode(errors="ignore")


@given(ids=st.lists(st.integers(0, SPECIAL) | st.sampled_from([0x80, 0xE4, 0xBD, 0xF0, SPECIAL]), max_size=120))
def test_invalid_bytes_come_as_in_the_whole_text(ids: list[int]) -> None:
    assert "".join(streamed(decode_bytes, list(b"prompt"), ids)) == continuation(decode_bytes, list(b"prompt"), ids)


@given(ids=st.lists(st.sampled_from([300, 301, 302, 303, 999, 0xE4, 0xBD, 0xA0, 0x41]), max_size=120))
def test_byte_runs_between_words_never_lose_words(ids: list[int]) -> None:
    """Where a run turns out invalid, text already handed on can't be taken back; everything else is the same."""
    joined, whole = "".join(streamed(decode_byte_fallback, [300], ids)), continuation(decode_byte_fallback, [300], ids)
    assert len(joined) == len(whole)
    assert all(ours == theirs or theirs == REPLACEMENT for ours, theirs in zip(joined, whole, strict=True))


def test_an_unfinished_character_comes_out_at_the_end_only() -> None:
    assert streamed(decode_bytes, [65], list("né你".encode())[:-1]) == ["n", "", "é", "", "", REPLACEMENT]


def test_broken_bytes_are_not_held_for_ever() -> None:
    pieces = streamed(decode_bytes, [65], [0x80] * 100)
    assert "".join(pieces) == REPLACEMENT * 100
    assert "".join(pieces[:50]) != ""


def test_a_special_token_comes_after_the_text_before_it() -> None:
    """Who gives it a text of its own, as a mark of thoughts has, gets the two in order."""
    stream = TextStream(decode_bytes, [], stop=("abz",))
    pieces = [stream.add(token_id) for token_id in (*b"So ab", SPECIAL, *b"zabz!")]
    assert "".join(pieces[:6]) == "So ab" and "".join(pieces[6:]) == "z" and stream.stopped_by == "abz"


def test_many_special_tokens_keep_the_space_of_the_next_word() -> None:
    for n_special in (1, 50, 500):
        assert "".join(streamed(decode_byte_fallback, [300], [999] * n_special + [301])) == " cat"


def test_no_part_of_the_prompt_is_repeated() -> None:
    for prompt in ("ends with " + REPLACEMENT * 3, "👍🏽" * 20, "x"):
        for decode in (decode_bytes, decode_byte_fallback):
            assert "".join(streamed(decode, list(prompt.encode()), list(b"abc"))) == "abc"


def test_the_work_per_token_is_bounded() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    for unit in (b"word ", "你好".encode(), b"\x80", "\ufffd".encode()):
        stream, longest = TextStream(decode, list(b"prompt")), 0
        for token in unit * 500:
            stream.add(token)
        assert longest <= 64


# Stop strings.


def char_by_char(text: str, stops: list[str]) -> str:
    """The definition: text ends before the stop string that is complete first; of two complete at once, the longer."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(
    text=st.text("ab\n", max_size=40),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=40),
)
def test_stop_strings_end_the_text_however_it_is_cut_into_tokens(text: str, stops: list[str], cuts: list[int]) -> None:
    tokens, rest = [], text
    for cut in cuts:
        tokens, rest = [*tokens, rest[:cut]], rest[cut:]
    tokens.append(rest)
    pieces = streamed(lambda ids: "".join(["p", *tokens][i] for i in ids), [0], list(range(1, len(tokens) + 1)), *stops)
    expected = char_by_char(text, stops)
    assert "".join(pieces) == expected
    for n_pieces in range(len(pieces)):
        assert expected.startswith("".join(pieces[:n_pieces]))


@given(text=texts, stop=st.sampled_from(["upon", "👧", "好世", "é", "\n", "there was x"]))
def test_stop_strings_end_text_of_many_bytes(text: str, stop: str) -> None:
    for decode in (decode_bytes, decode_byte_fallback):
        joined = "".join(streamed(decode, list(b"prompt"), list(text.encode()), stop))
        assert joined == (text[: text.index(stop)] if stop in text else text)


def test_a_stop_string_at_the_very_beginning_leaves_nothing() -> None:
    assert streamed(decode_bytes, list(b"p"), list(b"END of it"), "END") == ["", "", "", ""]


def test_text_is_held_only_while_it_may_begin_a_stop_string() -> None:
    assert streamed(decode_bytes, [65], list(b"<e<en!"), "<end>") == ["", "", "<e", "", "", "<en!", ""]
    assert streamed(decode_bytes, [65], list(b"a<en"), "<end>") == ["a", "", "", "", "<en"]
    assert streamed(decode_bytes, [65], list(b"abc"), "x", "y") == ["a", "b", "c", ""]


def test_the_stop_string_that_is_complete_first_counts() -> None:
    for token_sizes in ([4], [1, 1, 1, 1], [2, 2]):
        text, tokens = "zabc", []
        for size in token_sizes:
            tokens, text = [*tokens, text[:size]], text[size:]
        pieces = streamed(
            lambda ids, tokens=tokens: "".join(["p", *tokens][i] for i in ids),  # type: ignore[misc]
            [0],
            list(range(1, len(tokens) + 1)),
            "abc",
            "b",
        )
        assert "".join(pieces) == "za"


def test_nothing_follows_a_stop() -> None:
    stream = TextStream(decode_bytes, [65], ("b",))
    assert [stream.add(token) for token in b"abcd"] == ["a", "", "", ""]
    assert stream.stopped and stream.finish() == ""


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    assert "".join(streamed(decode_bytes, list(b"the EN"), list(b"D END"), "END")) == "D "
