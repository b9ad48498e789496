"""Compiled kernels on disk: whatever becomes of their files, the next process computes the same and says one line."""

import errno
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from numba import config, types
from numba.core.registry import cpu_target

from hetero_ee.errors import DiskFullError
from hetero_ee.runtime import kernel_cache
from hetero_ee.runtime.kernel_cache import FILLED_FILE, KernelCache, kernel_cache_folder, use_kernel_cache
from hetero_ee_cpu_ops.jit import kernel_files
from hetero_ee_cpu_ops.jit.kernel_files import (
    SUFFIX,
    UNFINISHED,
    KernelFiles,
    compiled,
    inner,
    read_kernel,
    write_kernel,
)

PROGRAM = """
import sys
from pathlib import Path
from hetero_ee.runtime.kernel_cache import use_kernel_cache
kernels = use_kernel_cache(Path(sys.argv[1]), lambda text, done, in_all: print(text, file=sys.stderr))
import numpy as np
from hetero_ee_cpu_ops.activate import activate
out = activate(np.linspace(-3, 3, 40, dtype=np.float32).reshape(2, 20), "silu", gated=False)
kernels.set_filled()
print(out.tobytes().hex())
"""


def child(cache: Path) -> "subprocess.CompletedProcess[str]":
    """A process that computes with a kernel kept in this cache folder."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache)], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache folder with the kernels of the program, and what the program prints."""
    cache = tmp_path_factory.mktemp("filled")
    ran = child(cache)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    return cache, ran.stdout


def kernels_in(cache: Path) -> list[Path]:
    return sorted(kernel_cache_folder(cache).glob(f"*{SUFFIX}"))


def damage(cache: Path, chance: random.Random) -> str:
    """Does something to one of the files; returns what."""
    files = kernels_in(cache)
    file, other = chance.sample(files, 2)
    kind = chance.choice(["bit", "truncated", "empty", "swapped", "deleted", "no mark"])
    content = bytearray(file.read_bytes())
    if kind == "bit":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    elif kind == "truncated":
        file.write_bytes(content[: chance.randrange(len(content))])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "swapped":
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        (file if kind == "deleted" else file.with_name(FILLED_FILE)).unlink()
    return f"{kind} {file.name}"


def check_damaged(filled: tuple[Path, str], seed: int) -> None:
    cache, expected = filled
    done = damage(cache, random.Random(seed))
    ran = child(cache)
    assert (ran.returncode, ran.stdout) == (0, expected), f"{done}: {ran.stderr}"
    is_seen = not done.startswith(("deleted", "no mark"))
    assert ran.stderr.count("\n") == is_seen and ("damaged" in ran.stderr) == is_seen, f"{done}: {ran.stderr}"
    assert KernelCache(kernel_cache_folder(cache)).is_filled()


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.sample(0)
def test_a_damaged_file_is_made_again(filled: tuple[Path, str], seed: int) -> None:
    check_damaged(filled, seed)


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    file = tmp_path / f"a{SUFFIX}"
    write_kernel(file, b"machine code")
    assert read_kernel(file) == b"machine code"
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert read_kernel(file) is None
    for n_bytes in range(len(content)):
        file.write_bytes(content[:n_bytes])
        assert read_kernel(file) is None
    (tmp_path / f"b{SUFFIX}").write_bytes(content)
    assert read_kernel(tmp_path / f"b{SUFFIX}") is None, "another kernel's file"


class Canary:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.sample(0)
def test_poison_never_runs(filled: tuple[Path, str], tmp_path: Path) -> None:
    """Neither in a kernel's file nor in an index as Numba's own cache would read it."""
    cache, expected = filled
    canary = tmp_path / "canary"
    poison = pickle.dumps(Canary(canary))
    for file in kernels_in(cache):
        file.write_bytes(file.read_bytes()[:32] + poison)
    for name in ("norm._norm-105.py311.nbi", "norm._norm-105.py311.1.nbc"):
        (kernel_cache_folder(cache) / name).write_bytes(poison)
    ran = child(cache)
    assert (ran.returncode, ran.stdout) == (0, expected) and not canary.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("wait_s", [0.1 * number for number in range(50)])
@pytest.mark.sample(0)
def test_killed_while_compiling(filled: tuple[Path, str], tmp_path: Path, wait_s: float) -> None:
    running = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.DEVNULL)
    time.sleep(wait_s)
    running.send_signal(signal.SIGKILL)
    running.wait()
    ran = child(tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, filled[1], "")


@pytest.mark.sample(0)
def test_two_processes_that_compile_at_once(filled: tuple[Path, str], tmp_path: Path) -> None:
    """Numba's own cache could give one number to kernels of two."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=300)[0] for process in running] == [filled[1]] * 2
    assert child(tmp_path).stdout == filled[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_inside_llvm_is_handled(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler would run in a callback, which loses exceptions, and then Numba would find no code to cache."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    engine = cpu_target.target_context.codegen()._engine._ee
    notify, double, arrived = engine._object_cache_notify, compiled(lambda x: x + x), list[int]()

    def interrupted(*arguments: Any) -> None:
        arrived.append(number)
        signal.raise_signal(number)
        notify(*arguments)

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, ended)
    monkeypatch.setattr(engine, "_object_cache_notify", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            double(3)
        assert arrived and signal.getsignal(number) is ended
    finally:
        signal.signal(number, before)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1 and double(3) == 6


def test_each_signature_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    double = compiled(lambda x: x + x)
    assert (double(2), double(2.5)) == (4, 5.0) and len(list(tmp_path.iterdir())) == 2
    again = KernelFiles(double.py_func)
    target = double.targetctx
    found = [again.load_overload((kind,), target) for kind in (types.int64, types.float64, types.float32)]
    assert [code and code.signature.return_type for code in found] == [types.int64, types.float64, None]


def test_a_function_for_compiled_ones_is_in_their_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    double = inner(lambda x: x + x)
    functions = [lambda x: double(x) + double(1), lambda x: double(x) + 2]
    assert [compiled(function)(2) for function in functions * 2] == [6, 6] * 2
    assert list(double.overloads) == [(types.int64,)] and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(TypeError, match="by compiled functions"):
        double(2)


def remarks(cache: Path) -> list[str]:
    said: list[str] = []
    use_kernel_cache(cache, lambda text, done, in_all: said.append(text))
    return said


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", "")


@pytest.mark.usefixtures("unset")
class TestFolder:
    def test_is_the_users_alone(self, tmp_path: Path) -> None:
        assert remarks(tmp_path) == []
        assert stat.S_IMODE(kernel_cache_folder(tmp_path).stat().st_mode) == 0o700

    @pytest.mark.parametrize("mode", [0o720, 0o702])
    def test_that_others_may_write_to_is_not_used(self, tmp_path: Path, mode: int) -> None:
        folder = kernel_cache_folder(tmp_path)
        folder.mkdir(parents=True)
        folder.chmod(mode)
        [said] = remarks(tmp_path)
        assert "other users may write to it" in said and str(folder) in said and "HETERO_EE_CACHE_DIR" in said

    @pytest.mark.parametrize("name", ["", "kernels"])
    def test_that_others_may_rename_is_not_used(self, tmp_path: Path, name: str) -> None:
        kernel_cache_folder(tmp_path / "cache").mkdir(parents=True)
        (tmp_path / "cache" / name).chmod(0o777)
        assert f"other users may write to {(tmp_path / 'cache' / name)}" in remarks(tmp_path / "cache")[0]
        (tmp_path / "cache" / name).chmod(0o1777)  # only owners rename here
        assert remarks(tmp_path / "cache") == []

    def test_whose_target_others_may_rename_is_not_used(self, tmp_path: Path) -> None:
        shared = tmp_path / "shared"
        (shared / "mine").mkdir(parents=True)
        (tmp_path / "cache").symlink_to(shared / "mine")
        assert remarks(tmp_path / "cache") == []
        config.CACHE_DIR = ""  # as in another process
        shared.chmod(0o777)
        assert f"other users may write to {shared.resolve()}" in remarks(tmp_path / "cache")[0]

    def test_a_pipe_in_it_is_removed(self, tmp_path: Path) -> None:
        folder = kernel_cache_folder(tmp_path)
        folder.mkdir(parents=True)
        for name in (f"a{SUFFIX}", FILLED_FILE):
            os.mkfifo(folder / name)
        assert "1 file of the compiled CPU kernels was damaged" in remarks(tmp_path)[0]
        assert [path.name for path in folder.iterdir()] == [FILLED_FILE]
        assert not KernelCache(folder).is_filled()

    def test_of_another_user_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel_cache_folder(tmp_path).mkdir(parents=True)
        owner = os.geteuid()
        monkeypatch.setattr(kernel_cache.os, "geteuid", lambda: owner + 1)
        assert "another user's" in remarks(tmp_path)[0]

    def test_that_is_a_link_or_a_file_is_not_used(self, tmp_path: Path) -> None:
        folder = kernel_cache_folder(tmp_path)
        folder.parent.mkdir()
        folder.symlink_to(tmp_path)
        assert "no folder" in remarks(tmp_path)[0]
        assert "Not a directory" in remarks(tmp_path / "file" if (tmp_path / "file").touch() is None else tmp_path)[0]

    def test_that_is_filled_and_read_only_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels = use_kernel_cache(tmp_path)
        assert kernels.keeps and compiled(lambda x: x + 1)(1) == 2
        kernels.set_filled()
        monkeypatch.setattr("numba.config.CACHE_DIR", "")
        monkeypatch.setattr(kernel_cache.os, "access", lambda _, mode: not mode & os.W_OK)
        assert remarks(tmp_path) == [] and str(kernels.folder) == config.CACHE_DIR
        for again in (use_kernel_cache(tmp_path), KernelCache(kernels.folder, is_writable=False)):
            assert again.is_filled() and not again.keeps
        (kernels.folder / FILLED_FILE).unlink()
        again.set_filled()
        monkeypatch.setattr("numba.config.CACHE_DIR", "")
        assert "compiled at every start" in remarks(tmp_path)[0] and str(kernels.folder) == config.CACHE_DIR
        assert not (kernels.folder / FILLED_FILE).exists()

    def test_that_is_not_used_gets_nothing(self, tmp_path: Path) -> None:
        folder = kernel_cache_folder(tmp_path)
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        kernels = use_kernel_cache(tmp_path)
        kernels.set_filled()
        assert compiled(lambda x: x + 1)(1) == 2
        assert not kernels.is_filled() and not any(folder.iterdir())

    def test_an_unfinished_file_goes_once_it_is_old(self, tmp_path: Path) -> None:
        folder = kernel_cache_folder(tmp_path)
        folder.mkdir(parents=True, mode=0o700)
        old, new = folder / f"a{UNFINISHED}", folder / f"b{UNFINISHED}"
        for file in (old, new):
            file.touch()
        os.utime(old, (0, 0))
        assert remarks(tmp_path) == [] and list(folder.iterdir()) == [new]


@pytest.mark.usefixtures("unset")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled works; that it can't be kept ends in a sentence that names the folder."""
    kernels = use_kernel_cache(tmp_path)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", full)
    assert compiled(lambda x: x + 1)(1) == 2
    assert not any(kernels.folder.iterdir())
    with pytest.raises(DiskFullError, match=str(kernels.folder)):
        kernels.set_filled()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        kernel_files.write_kernel(tmp_path / f"a{SUFFIX}", b"code")
    assert not any(tmp_path.iterdir())


def test_a_file_that_others_may_have_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may have been exchanged for another since it was checked."""
    file, former = tmp_path / f"a{SUFFIX}", os.umask(0o002)
    try:
        write_kernel(file, b"code")
    finally:
        os.umask(former)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / file.name).symlink_to(file)
    assert read_kernel(file) == b"code" and read_kernel(tmp_path / "links" / file.name) is None
    file.chmod(0o666)
    assert read_kernel(file) is None
    file.chmod(0o644)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert read_kernel(file) is None
