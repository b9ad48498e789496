"""Settings: which source wins, and one sentence for every value that can't be used."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.config import cache_folder
from hetero_ee.config.settings import DEFAULT, FILE, FLAG, read_settings
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import SETTINGS
from hetero_ee.options.option import Option

# One value of each setting for every source: flag, environment, file as TOML, and what the last two are read as.
VALUES: dict[str, tuple[Any, str, str, Any, Any]] = {
    "model": ("a", "org/b", '"./c"', "org/b", "./c"),
    "threads": (1, " 2", "3", 2, 3),
    "ctx_size": (100, "200", "300", 200, 300),
    "quantizer": ("rtn", "search", '"none"', "search", "none"),
    "activations": ("int8", "int16", '"int16"', "int16", "int16"),
    "offline": (True, "off", "true", False, True),
    "profile": ("auto", "off", '"auto"', "off", "auto"),
    "cache_dir": ("/a", "b", '"/c"', Path("b"), Path("/c")),
    "data_dir": ("/a", "b", '"/c"', Path("b"), Path("/c")),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.setting)
def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(setting: Option, file: Path) -> None:
    flag, in_environment, in_file, of_environment, of_file = VALUES[setting.setting]
    environment = {"HETERO_EE_CONFIG": str(file)}
    file.write_text("")

    def resolved(given: Any = None) -> tuple[Any, str]:
        found = read_settings(environment).resolve(setting.setting, given)
        return found.value, found.source

    assert resolved() == (setting.default, DEFAULT)
    file.write_text(f"{setting.setting} = {in_file}\n")
    assert resolved() == (of_file, FILE)
    environment[setting.variable] = in_environment
    assert resolved() == (of_environment, f"HETERO_EE_{setting.setting.upper()}")
    assert resolved(flag)[1] == FLAG
    assert str(resolved(flag)[0]) == str(flag)
    environment[setting.variable] = ""
    assert resolved() == (of_file, FILE)  # an empty variable is none


def test_the_table_agrees_with_the_engine() -> None:
    from hetero_ee.engine import Engine
    from hetero_ee.options.engine import UNQUANTIZED
    from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, QUANTIZERS

    quantizer = SETTINGS["quantizer"]
    assert sorted(quantizer.choices) == sorted((*QUANTIZERS, UNQUANTIZED))
    assert quantizer.default_text.endswith(DEFAULT_QUANTIZER)
    for argument, name in (("threads", "threads"), ("context_tokens", "ctx_size")):
        with pytest.raises(UsageError, match=f"to {SETTINGS[name].most}\\."):
            too_many: Any = {argument: int(SETTINGS[name].most or 0) + 1}
            Engine.from_pretrained(**too_many)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("threads", "+7", 7),
        ("threads", "1024\n", 1024),
        *[("offline", text, True) for text in ("1", "true", "YES", " on ")],
        *[("offline", text, False) for text in ("0", "False", "no", "OFF")],
        ("cache_dir", "~/x", Path.home() / "x"),
        ("model", " a b ", " a b "),
    ],
)
def test_what_variables_are_read_as(name: str, text: str, value: Any) -> None:
    environment = {"HETERO_EE_CONFIG": os.devnull, SETTINGS[name].variable: text}
    assert read_settings(environment).value(name) == value


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("threads", "many", "HETERO_EE_THREADS is 'many'; expected a whole number from 0 to 1024."),
        ("threads", "-1", "HETERO_EE_THREADS is -1; expected"),
        ("threads", "1025", "HETERO_EE_THREADS is 1025; expected"),
        ("threads", "1_0", "HETERO_EE_THREADS is '1_0'"),
        ("threads", "٣", "HETERO_EE_THREADS is"),
        ("threads", "9" * 5000, "HETERO_EE_THREADS is '999"),
        ("ctx_size", "1e3", "HETERO_EE_CTX_SIZE is '1e3'; expected a whole number from 0 to 16777216."),
        ("quantizer", "int3", "HETERO_EE_QUANTIZER is 'int3'; expected one of codebook,"),
        ("offline", "perhaps", "HETERO_EE_OFFLINE is 'perhaps'; expected true or false."),
        ("cache_dir", "~no-such-user-here/x", "HETERO_EE_CACHE_DIR is '~no-such-user-here/x', and there is no such"),
        ("cache_dir", "a\0b", "HETERO_EE_CACHE_DIR is 'a\\x00b'; expected a folder."),
        ("model", "a\0b", "HETERO_EE_MODEL is 'a\\x00b'; expected some text."),
    ],
)
def test_variables_that_cannot_be_used(name: str, text: str, sentence: str) -> None:
    settings = read_settings({"HETERO_EE_CONFIG": os.devnull, SETTINGS[name].variable: text})
    with pytest.raises(UsageError) as refused:
        settings.resolve(name)
    assert sentence in str(refused.value) and str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("flag", "name", "sentence"),
    [
        (-1, "threads", "threads is -1"),
        (2**24 + 1, "ctx_size", "context_tokens is 16777217"),
        ("", "model", "model is"),
    ],
)
def test_flags_that_cannot_be_used(flag: Any, name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_settings({"HETERO_EE_CONFIG": os.devnull}).resolve(name, flag)


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "wrong type": (b'threads = "3"', "threads in FILE is '3'; expected a whole number from 0 to 1024."),
    "a float": (b"threads = 3.0", "threads in FILE is 3.0; expected"),
    "true is no number": (b"threads = true", "threads in FILE is True; expected"),
    "a number is not true": (b"offline = 1", "offline in FILE is 1; expected true or false."),
    "too many": (b"threads = 1025", "threads in FILE is 1025; expected"),
    "too few": (b"ctx_size = -1", "ctx_size in FILE is -1; expected"),
    "not a number": (b"threads = nan", "threads in FILE is nan; expected"),
    "a list": (b"model = ['a']", "model in FILE is ['a']; expected some text."),
    "a date": (b"quantizer = 2026-01-01", "quantizer in FILE is datetime.date(2026, 1, 1); expected one of"),
    "a table": (b"[threads]\nn = 1", "threads in FILE is {'n': 1}; expected"),
    "no such quantizer": (b"quantizer = 'Q4_K_M'", "quantizer in FILE is 'Q4_K_M'; expected one of"),
    "empty text": (b"model = ''", "model in FILE is ''; expected some text."),
    "a null character": (b'cache_dir = "/a\\u0000b"', "cache_dir in FILE is '/a\\x00b'; expected a folder."),
    "a relative folder": (b"cache_dir = 'cache'", "cache_dir in FILE is 'cache'; give a full path"),
    "no such home": (b"cache_dir = '~no-such-user-here'", "cache_dir in FILE is '~no-such-user-here', and"),
    "a key nearly right": (b"thread = 3", "'thread' in FILE is not a setting; did you mean threads?"),
    "a key of another kind": (b"temperature = 1", "'temperature' in FILE is not a setting; there are model, "),
    "a table for all": (b"[hetero_ee]\nthreads = 1", "'hetero_ee' in FILE is not a setting"),
    "a key twice": (b"threads = 1\nthreads = 2", "FILE, which is not TOML: Cannot overwrite a value"),
    "no TOML": (b"threads: 3", "FILE, which is not TOML: Expected '='"),
    "a huge number": (b"threads = " + b"9" * 5000, "FILE, which is not TOML: Exceeds the limit"),
    "not UTF-8": (b"model = '\xff'", "FILE, which is not UTF-8 text at byte 9."),
    "binary": (bytes(range(256)), "FILE, which is not UTF-8 text at byte 128."),
    "deeply nested": (b"threads = " + b"[" * 20000, "FILE, which is nested too deeply."),
    "too long": (b"#" * (2**16 + 1), "FILE, which has more than 64 KiB."),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_used(name: str, file: Path) -> None:
    content, sentence = BAD_FILES[name]
    file.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        settings = read_settings({"HETERO_EE_CONFIG": str(file)})
        for setting in SETTINGS.values():
            settings.resolve(setting.setting)
    message = str(refused.value)
    assert sentence.replace("FILE", str(file)) in message
    assert "\n" not in message and message.endswith((".", "?")) and not message.endswith("..")


def a_folder(file: Path) -> None:
    file.mkdir()


def a_pipe_nobody_writes_to(file: Path) -> None:
    os.mkfifo(file)


def nothing(file: Path) -> None:
    pass


def a_link_to_itself(file: Path) -> None:
    file.symlink_to(file)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (a_folder, "it is a folder, not a regular file"),
        (a_pipe_nobody_writes_to, "it is a pipe, not a regular file"),
        (nothing, "No such file or directory"),
        (a_link_to_itself, "Too many levels of symbolic links"),
    ],
)
def test_paths_that_are_no_file(make: Callable[[Path], None], reason: str, file: Path) -> None:
    make(file)
    with pytest.raises(UsageError) as refused:
        read_settings({"HETERO_EE_CONFIG": str(file)})
    assert str(refused.value) == f"HETERO_EE_CONFIG names {file}, which can't be read ({reason})."


def test_a_file_that_may_not_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    file.write_text("")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match=r"can't be read \(Permission denied\)"):
        read_settings({"HETERO_EE_CONFIG": str(file)})


def test_the_platforms_file_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_config_path", lambda name: tmp_path / name)
    assert read_settings({}).value("threads") == 0
    (tmp_path / "hetero_ee").mkdir()
    (tmp_path / "hetero_ee" / "config.toml").write_bytes(b"\xef\xbb\xbfthreads = 5\r\n")  # as Windows editors save it
    assert read_settings({}).value("threads") == 5
    (tmp_path / "hetero_ee" / "config.toml").write_text("threads = '5'")
    with pytest.raises(UsageError, match="threads in"):
        read_settings({}).value("threads")


def test_the_cache_folder_is_the_setting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_EE_CONFIG", str(file))
    file.write_text("cache_dir = '/from/file'")
    assert cache_folder() == Path(os.environ["HETERO_EE_CACHE_DIR"])
    monkeypatch.delenv("HETERO_EE_CACHE_DIR")
    assert cache_folder() == Path("/from/file")
    file.write_text("")
    assert cache_folder().name == "hetero_ee"


def test_variables_without_a_meaning_are_found() -> None:
    known = {setting.variable: "1" for setting in SETTINGS.values()} | {"HETERO_EE_CONFIG": os.devnull, "PATH": ""}
    assert read_settings(known).unknown_variables() == []
    assert read_settings(known | {"HETERO_EE_THREAD": "2"}).unknown_variables() == ["HETERO_EE_THREAD"]


names = st.sampled_from(list(SETTINGS))
toml_values = st.one_of(
    st.text().map(repr),
    st.integers().map(str),
    st.floats().map(str),
    st.booleans().map(lambda value: str(value).lower()),
)
contents = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(names | st.text(max_size=8), toml_values, max_size=4).map(
        lambda keys: "\n".join(f"{key} = {value}" for key, value in keys.items()).encode("utf-8", "surrogatepass")
    ),
)


@given(contents, st.dictionaries(names, st.text(max_size=30), max_size=3), names, st.none() | st.integers() | st.text())
def test_nothing_but_a_usage_error_is_ever_raised(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, variables: dict[str, str], name: str, flag: Any
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    environment = {SETTINGS[key].variable: text for key, text in variables.items()}
    with contextlib.suppress(UsageError):
        settings = read_settings(environment | {"HETERO_EE_CONFIG": str(file)})
        found = settings.resolve(name, flag)
        assert found.value is None or isinstance(found.value, found.setting.kind)
