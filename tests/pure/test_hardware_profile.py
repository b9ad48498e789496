"""Hardware profiles: figures between measured points, files read with suspicion, and the shipped ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee import UsageError
from hetero_ee.layers.state import KvState
from hetero_ee_profiles.data_sheets import DataSheet, data_sheets
from hetero_ee_profiles.hardware import AttentionTime, HardwareProfile, interpolated
from hetero_ee_profiles.measurement import Origin, derived, measured
from hetero_ee_profiles.records import from_json, read_record, to_json, write_record
from hetero_ee_profiles.reference import derived_profile, reference_names, reference_profile
from tests.shipped import DATA_SHEETS

ORIGIN = Origin("a command", "2026-11-21", "versions")
PROFILE = derived_profile(DATA_SHEETS[0], "2026-11-21")


def changed(path: str, value: Any) -> str:
    """The profile's JSON with one place replaced; `value` may be a function of what was there."""
    body = json.loads(to_json(PROFILE))
    *inner, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    place = body
    for step in inner:
        place = place[step]
    if value is DELETED:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return json.dumps(body)


def older() -> str:
    """A profile of version 3, which knew no times of a call."""
    body = json.loads(changed("version", 3))
    for times in (*body["cpu"], body["gpu"]):
        del times["call"]
    return json.dumps(body)


DELETED = object()
BAD: dict[str, tuple[Callable[[], str], str]] = {
    "empty": (lambda: "", "Expecting value"),
    "cut off": (lambda: to_json(PROFILE)[:-100], "Expecting|Unterminated|delimiter"),
    "a list": (lambda: "[]", "expected `object`"),
    "too deep": (lambda: "[" * 100_000, "nested too deeply"),
    "a future version": (lambda: changed("version", 5), "profile version 5, this engine reads version 4"),
    "an older version": (lambda: older(), "^it has profile version 3, this engine reads version 4$"),
    "a version as text": (lambda: changed("version", "1"), "version: expected `int`, got `str`"),
    "a version as truth": (lambda: changed("version", True), "version: expected `int`, got `bool`"),
    "another kind": (lambda: changed("kind", "guessed"), "kind is 'guessed'"),
    "a field missing": (lambda: changed("machine.driver", DELETED), r"machine\.driver is missing"),
    "a field too many": (lambda: changed("machine.colour", "red"), r"machine\.colour is unknown"),
    "a negative time": (lambda: changed("cpu.0.matmuls.3.time.value", -1.0), r"cpu\[0\]\.matmuls\[3\]\.time"),
    "a time of zero": (lambda: changed("cpu.0.matmuls.0.time.p20", 0.0), "positive and ascending"),
    "quantiles upside down": (lambda: changed("gpu.read_bytes_per_s.p80", 1.0), "positive and ascending"),
    "not a number": (lambda: changed("cpu.0.matmuls.0.time.value", float("nan")), "NaN is not a number"),
    "infinity": (lambda: changed("cpu.0.matmuls.0.time.value", float("inf")), "Infinity is not a number"),
    "an enormous float": (lambda: to_json(PROFILE).replace('"count": 0', '"count": 1e999', 1), "not a finite number"),
    "an enormous integer": (lambda: changed("cpu.0.matmuls.0.time.value", 10**400), "out of range|digits"),
    "more digits than Python reads": (lambda: changed("version", 0).replace("0", "9" * 5000, 1), "digits"),
    "text for a number": (lambda: changed("cpu.0.matmuls.0.m", "4"), r"matmuls\[0\]\.m: expected `int`, got `str`"),
    "rows of zero": (lambda: changed("cpu.0.matmuls.0.m", 0), "m is 0, expected 1 or more"),
    "an unknown cache": (lambda: changed("cpu.0.attentions.0.kv_type", "fp3"), "kv_type is 'fp3', expected one of"),
    "two kinds of cache": (lambda: changed("gpu.attentions.0.kv_type", "int8"), "several kv_types"),
    "no matmuls": (lambda: changed("cpu.0.matmuls", []), "matmuls is empty"),
    "no processor": (lambda: changed("cpu", []), "ascending numbers of threads"),
    "the same threads twice": (lambda: changed("cpu", lambda cpu: [cpu[0], cpu[0]]), "ascending numbers of threads"),
    "negative memory": (lambda: changed("gpu.free_bytes", -1), "must be 0 or more"),
    "a GPU without a link": (lambda: changed("link", None), "gpu and link must be given together"),
    "control characters": (lambda: changed("kind", "\x1b[2J\n"), r"\\x1b"),
    "a field twice": (lambda: to_json(PROFILE).replace('"version": 4,', '"version": 4, "version": 4,', 1), "twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_profile_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, words = BAD[name]
    file = tmp_path / "profile.json"
    file.write_text(make(), encoding="utf-8")
    with pytest.raises(ValueError, match=words) as refusal:
        read_record(HardwareProfile, file)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 400


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**30)
    for name in ("latin", "huge", "missing", "."):
        with pytest.raises((ValueError, OSError)):
            read_record(HardwareProfile, tmp_path / name)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_record(PROFILE, tmp_path / "new" / "profile.json")
    assert read_record(HardwareProfile, tmp_path / "new" / "profile.json") == PROFILE
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["profile.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "profile.json"
    write_record(PROFILE, file)

    def broken(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        write_record(ORIGIN, file)
    assert read_record(HardwareProfile, file) == PROFILE and len(list(tmp_path.iterdir())) == 1


@given(st.binary(max_size=200), st.integers(0, 10**6))
def test_any_damage_is_a_value_error_or_a_valid_profile(noise: bytes, place: int) -> None:
    text = to_json(PROFILE).encode()
    place %= len(text)
    damaged = (text[:place] + noise + text[place + len(noise) :]).decode(errors="replace")
    try:
        found = from_json(HardwareProfile, damaged)
    except ValueError:
        return
    assert isinstance(found, HardwareProfile) and from_json(HardwareProfile, to_json(found)) == found


@pytest.mark.parametrize("name", reference_names())
def test_reference_profiles_say_that_nothing_was_measured(name: str) -> None:
    profile = reference_profile(name)
    assert (profile.name, profile.kind, profile.disk_read_bytes_per_s.count) == (name, "derived", 0)
    assert from_json(HardwareProfile, to_json(profile)) == profile


def test_there_is_a_profile_for_each_data_sheet_and_no_other_name() -> None:
    assert reference_names() == sorted({sheet.name for sheet in data_sheets()}) and len(data_sheets()) >= 40
    for name in ("../rtx-3060-12gb", "nope", "", None, 3, ["rtx-3060-12gb"]):
        with pytest.raises(UsageError, match=r"is not a shipped profile; `hetero-ee profile --list` lists them"):
            reference_profile(name)  # type: ignore[arg-type]


def test_the_usual_cards_are_shipped() -> None:
    """From 4 GiB on, of desktops and laptops, by both makers."""
    names = set(reference_names())
    for series in ("rtx-30", "rtx-40", "rtx-50"):
        assert {series in name and "laptop" in name for name in names} == {True, False}
    assert {"rtx-3060-12gb", "rtx-4060-ti-16gb", "rtx-5090-32gb", "rtx-3080-laptop-16gb", "rx-7900-xtx-24gb"} <= names
    for sheet in data_sheets():
        assert sheet.name.endswith(f"-{sheet.vram_gib}gb") and 100 < sheet.vram_gb_s < 2000
        assert 5 < sheet.fp32_tflops < 110 and 15 < sheet.link_gb_s < 64 and sheet.ram_gb_s < sheet.vram_gb_s


def test_interpolation() -> None:
    points = [(1, 2.0), (4, 3.0), (8, 7.0)]
    assert [interpolated(points, at) for at in (1, 2.5, 4, 6, 8, 10)] == [2.0, 2.5, 3.0, 5.0, 7.0, 9.0]
    assert interpolated(points, 0.5) == 2.0 and interpolated([(4, 2.0)], 6) == 3.0


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=50))
def test_a_measurement_is_the_median_between_its_quantiles(samples: list[float]) -> None:
    found = measured(samples, "s", ORIGIN)
    assert min(samples) <= found.p20 <= found.value <= found.p80 <= max(samples) and found.count == len(samples)


def test_times_between_shapes_and_rows() -> None:
    times = PROFILE.cpu_with(0)
    one = times.matmul_s("int4", 4096, 4096, 1)
    call_s = times.call.value
    assert times.matmul_s("int4", 8192, 4096, 1) == pytest.approx(call_s + 2 * (one - call_s))
    assert times.matmul_s("int4", 4096, 4096, 1, share=0.25) == pytest.approx(call_s + (one - call_s) / 4)
    assert one <= times.matmul_s("int4", 4096, 4096, 3) <= times.matmul_s("int4", 4096, 4096, 4)
    whole = times.attention_s(32, 32, 128, 1, 1024, few=True)
    assert times.attention_s(32, 32, 128, 1, 2048, few=True) > whole
    for quarter in (
        times.attention_s(32, 8, 128, 1, 1024, few=True),
        times.attention_s(32, 32, 128, 1, 1024, few=True, kept_share=0.25),
    ):
        assert quarter == pytest.approx(call_s + (whole - call_s) / 4)
    many = times.attention_s(32, 32, 128, 64, 1024, few=False, kept_share=0.25)
    assert times.attention_s(16, 16, 128, 64, 1024, few=False) == pytest.approx(call_s + (many - call_s) / 2)
    with pytest.raises(KeyError):
        times.matmul_s("int3", 1, 1, 1)


def test_attention_of_more_tokens_reads_once_and_computes_for_each() -> None:
    """Of a decode batch, another cache type shrinks what one token takes, not what more tokens add; an m that was
    timed at one context grows with it as its neighbours do."""
    times = PROFILE.cpu_with(0)
    row, call_s = times.attentions[0], times.call.value

    def at(m: int, context_tokens: int, seconds: float) -> AttentionTime:
        time = replace(row.time, value=seconds, p20=seconds, p80=seconds)
        return replace(row, m=m, context_tokens=context_tokens, time=time)

    heads = row.n_heads, row.n_kv_heads, row.head_dim
    rows = at(1, 16, 1.0), at(1, 1000, 11.0), at(4, 16, 2.0), at(7, 16, 3.0), at(7, 1000, 25.0)
    times = replace(times, attentions=rows)
    assert times.attention_s(*heads, 1, 1000, few=True) == pytest.approx(11.0)
    assert times.attention_s(*heads, 4, 1000, few=True) == pytest.approx(2.0 + (10.0 + 22.0) / 2)
    halved = times.attention_s(*heads, 7, 1000, few=True, kept_share=0.5)
    assert halved == pytest.approx(call_s + (11.0 - call_s) / 2 + 14.0)
    alone = replace(times, attentions=(at(4, 16, 2.0),))
    assert alone.attention_s(*heads, 4, 29, few=False) == pytest.approx(4.0)


@pytest.mark.parametrize("window", [None, 512, 1024, 300])
@pytest.mark.parametrize("before", [0, 512, 4096])
def test_a_prompts_attention_is_predicted_from_shorter_chunks(before: int, window: int | None) -> None:
    """A quick profile has chunks of 128 tokens after two contexts; each token costs a little, and what it sees."""
    times = PROFILE.cpu_with(0)
    row, heads = times.attentions[0], (8, 4, 256)

    def chunk_s(m: int, n_positions: float) -> float:
        return m * (1e-6 + 1e-8 * n_positions)

    def at(m: int, context_tokens: int) -> AttentionTime:
        seconds = chunk_s(m, context_tokens - (m - 1) / 2)
        return AttentionTime(
            *heads, m, context_tokens, "fp16", replace(row.time, value=seconds, p20=seconds, p80=seconds)
        )

    measured = replace(times, attentions=(at(1, 16), at(1, 1024), at(4, 16), at(128, 128), at(128, 1024)))
    seen = sum(min(position, window or position) for position in range(before + 1, before + 513)) / 512
    found = KvState(*heads, window).read_s(measured, 512, before + 512, "fp16")
    assert found == pytest.approx(chunk_s(512, seen))


@pytest.mark.parametrize("sheet", DATA_SHEETS, ids=lambda sheet: sheet.name)
def test_a_call_is_no_matter_of_size(sheet: DataSheet) -> None:
    """A layer of twice the width is four times the bytes and as many launches."""
    times = derived_profile(sheet, "2026-11-22").gpu
    assert times is not None
    for layout in ("int4", "int8"):
        small, large = (times.matmul_s(layout, side, side, 1) for side in (1024, 2048))
        assert large - small == pytest.approx(3 * (small - times.call.value))
        byte_s = (large - small) / (3 * 1024**2 * {"int4": 4.5 / 8, "int8": 8.5 / 8}[layout])
        assert 1 / byte_s == pytest.approx(0.9 * sheet.vram_gb_s * 1e9)


def test_a_time_below_a_calls_makes_nothing_free() -> None:
    times = replace(PROFILE.cpu_with(0), call=derived(1.0, "s", ORIGIN))
    one = times.matmul_s("int4", 32768, 4096, 1)
    assert one < 1.0 and times.matmul_s("int4", 65536, 4096, 1) == pytest.approx(1.5 * one)


@pytest.mark.parametrize("sheet", DATA_SHEETS, ids=lambda sheet: sheet.name)
def test_the_cpu_and_copies_beside_it_stay_below_the_rated_bandwidth(sheet: DataSheet) -> None:
    profile = derived_profile(sheet, "2026-11-22")
    times, link = profile.cpu_with(0), profile.link
    assert link is not None
    weights_s = times.matmul_s("int4", 2**15, 2**15, 1) - times.call.value
    both = 2**30 * 4.5 / 8 / weights_s + link.beside_cpu_bytes_per_s.value
    assert both <= 1.0001 * sheet.ram_gb_s * 1e9 == 1.0001 * times.read_bytes_per_s.value
    assert link.beside_cpu_bytes_per_s.value <= link.to_gpu_bytes_per_s.value


def test_a_derived_figure_says_so() -> None:
    figure = derived(3.0, "B/s", ORIGIN)
    assert (figure.count, figure.p20, figure.p80, figure.spread) == (0, 3.0, 3.0, 0.0)
    with pytest.raises(ValueError, match="positive and ascending"):
        derived(0.0, "B/s", ORIGIN)
