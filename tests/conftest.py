"""What all tests share: nobody's real cache is touched, property tests repeat themselves, and where models lie."""

import gc
import io
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import filelock
import hypothesis
import pytest

from hetero_ee.config import demo_model_folder
from tests.command_line import N_TOKENS, PROMPT, Cli, Ended
from tests.kernel_locks import compile_once

MOST_CASES = 3  # of a test by default
KERNELS_KEPT_S = 7 * 24 * 3600  # since the last one was compiled; other sources have a folder of their own
SHARED_MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, which is not imported yet: the workers share the cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles the package again
sys.dont_write_bytecode = False  # else each run with `-n 0` rewrites the assertions of all test files again

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure() -> None:
    """A suite run in the background has SIGINT ignored, which its child processes would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what collection creates out of the garbage collector, whose passes would visit it in every test.

    Imported modules and collected tests live until the process ends.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests first, and mark the cases that do not run by default.

    Of a test with the marker `few`, all but that many cases are `slow`. Of the cases left, `representatives` run by
    default and the others are `full`.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        if few := cases[0].get_closest_marker("few"):
            for number, case in enumerate(cases):
                if number * few.args[0] % len(cases) >= few.args[0]:
                    case.add_marker(pytest.mark.slow)
        in_ci = [case for case in cases if not case.get_closest_marker("slow") and not case.get_closest_marker("full")]
        chosen = representatives(in_ci)
        for case in in_ci:
            if case not in chosen:
                case.add_marker(pytest.mark.full)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much compiled GPU code the tests in tests/gpu/ptx executed."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    ended = [report for report in reports if getattr(report, "when", "") == "teardown"]
    counts = [value for report in ended for name, value in report.user_properties if name == "ptx"]
    if counts:
        n_launches, n_instructions = (sum(part) for part in zip(*counts, strict=True))
        terminalreporter.write_line(f"compiled PTX: {n_launches:,} launches, {n_instructions:,} instructions of warps")


def representatives(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return at most MOST_CASES cases of a test, or n if it is marked `sample(n)`, and none without a new value.

    The next case is always one with the most values that no chosen case has.
    Of equal ones, those that are spread evenly go first.
    """
    limit = cases[0].get_closest_marker("sample") if cases else None
    n_cases = limit.args[0] if limit else MOST_CASES
    stride = max(1, len(cases) // max(1, n_cases))
    spread = [case for start in range(stride) for case in cases[start::stride]]
    values = {case: parameters(case) for case in spread}
    chosen: list[pytest.Item] = []
    while values and len(chosen) < n_cases:
        best = max(values, key=lambda case: len(values[case]))
        if chosen and not values[best]:
            break
        chosen.append(best)
        covered = values.pop(best)
        values = {case: left - covered for case, left in values.items()}
    return chosen


def parameters(case: pytest.Item) -> set[tuple[str, tuple[int, ...]]]:
    """Return an identity of each parameter's value. What one `parametrize` sets together counts as one parameter."""
    values = dict(case.callspec.params) if isinstance(case, pytest.Function) and hasattr(case, "callspec") else {}
    names = [mark.args[0] for mark in case.iter_markers("parametrize")]
    groups = [name.replace(" ", "").split(",") if isinstance(name, str) else name for name in names]
    groups += [[name] for name in values.keys() - {name for group in groups for name in group}]
    return {(",".join(group), tuple(id(values[name]) for name in group)) for group in groups}


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder that all worker processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(pytestconfig, "workerinput") else own


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_run(tmp_path_factory: pytest.TempPathFactory, run_folder: Path) -> Iterator[Path]:
    """A cache of this run. Only compiled kernels are kept for the next one, in pytest's folder of this user."""
    cache, kept = run_folder / "cache", run_folder.parent / "kernels"
    cache.mkdir(exist_ok=True)
    if kept.parent.name.startswith("pytest-of-") and not os.environ.get("CI"):
        kept.mkdir(exist_ok=True)
        for folder in kept.iterdir():
            with suppress(FileNotFoundError):  # another process has removed it
                if folder.stat().st_mtime < time.time() - KERNELS_KEPT_S:
                    shutil.rmtree(folder)
        with suppress(FileExistsError):
            (cache / "kernels").symlink_to(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_EE_CACHE_DIR", str(cache))
        patch.setenv("HETERO_EE_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        patch.setenv("HETERO_EE_CONFIG", os.devnull)
        patch.setenv("HETERO_EE_PROFILE", "off")  # a machine that runs tests has other things to do than be measured
        yield cache


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled_once(run_folder: Path, pytestconfig: pytest.Config) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(pytestconfig, "workerinput"):
            (run_folder / "locks").mkdir(exist_ok=True)
            compile_once(patch, run_folder / "locks")
        yield


@pytest.fixture(scope="session", autouse=True)
def _every_profile_is_kept() -> Iterator[None]:
    """Whatever else runs beside the tests: only those of disturbed profiles look for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero_ee.profiling.disturbance.BUSY_SPREAD", math.inf)
        patch.setattr("hetero_ee.profiling.disturbance.BUSY_SHARE", math.inf)
        patch.setattr("hetero_ee.profiling.disturbance.BUSY_SHARE", math.inf)
        patch.setattr("hetero_ee.profiling.disturbance.SLOW_SHARE", 0.0)
        yield


@pytest.fixture(scope="session")
def kernels(_cache_of_this_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests of this run find the CPU kernels; those of a first token are there already."""
    from hetero_ee.runtime.opening import open_on_cpu
    from tests.executor_support import model_of

    with filelock.FileLock(_cache_of_this_run / "kernels.lock"):
        open_on_cpu(*model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama")), 64, 1).close()
    return _cache_of_this_run / "kernels"


@pytest.fixture
def cache(tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with nothing in it but a link to the kernels of this session."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "kernels").symlink_to(kernels)
    monkeypatch.setenv("HETERO_EE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def converted_demo(cache: Path, demo: Path, _cache_of_this_run: Path) -> None:
    """Puts the demo model in int4 into the test's own cache: to convert it would take seconds in each test."""
    from hetero_ee.weights.store.library import make_store

    store = make_store(demo, cache=_cache_of_this_run)
    shutil.copytree(store, cache / "stores" / store.name)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, not there yet: what compiles kernels takes seconds."""
    folder = tmp_path / "empty cache"
    monkeypatch.setenv("HETERO_EE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo model's folder."""
    if not (demo_model_folder() / "model.safetensors").is_file():
        pytest.skip("the demo model is not in hetero_ee/assets")
    return demo_model_folder()


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A trained Llama with a ByteFallback tokenizer."""
    folder = SHARED_MODELS / "stories260K"
    if not folder.is_dir():
        pytest.skip("shared/models/stories260K is not beside the repository")
    return folder


@pytest.fixture(scope="session")
def tiny(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the demo model's tokenizer: nonsense in milliseconds. Its files are not to be changed."""
    from hetero_ee.hub.config_file import read_spec
    from tests.families import random_model, save_checkpoint

    model = random_model("llama", vocab_size=read_spec(demo).vocab_size, max_position_embeddings=600)
    return save_checkpoint(model, tmp_path_factory.mktemp("models") / "tiny", tokenizer_from=demo)


@pytest.fixture
def own_tiny(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it for the test to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))


@pytest.fixture(scope="session")
def said(tiny: Path) -> str:
    """What the library says after PROMPT."""
    from hetero_ee import Engine

    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
        return engine.generate(PROMPT, max_new_tokens=N_TOKENS).text


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path) -> Iterator[Cli]:
    """Runs main() in this process; `stdin` is what standard input holds."""
    from hetero_ee_cli.app import main

    def run(*arguments: object, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "argv", ["hetero-ee", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ended(ended.value.code if isinstance(ended.value.code, int) else int(bool(ended.value.code)), out, err)

    handler = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, handler)
