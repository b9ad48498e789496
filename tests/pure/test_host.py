"""Commands that hang or talk without end, files that are not there, and disks on which nothing works."""

import errno
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetero_ee_profiles.host import disk
from hetero_ee_profiles.host.disk import DiskInfo, disk_info, existing_folder, try_disk
from hetero_ee_profiles.host.host import MAX_TEXT_BYTES, Answer, read_text, run_command, this_host
from hetero_ee_profiles.host.instruction_set import NAMES, instruction_set, kernel_instruction_set, rank
from tests.recorded_hosts import recorded


def python(code: str, timeout_s: float = 30.0) -> Answer:
    return run_command([sys.executable, "-S", "-c", code], timeout_s)


def test_commands() -> None:
    assert python("print('x')") == Answer("x\n", "")
    assert python("print('x'); raise SystemExit(3)") == Answer("x\n", "exit code 3")
    assert python("import os; os.write(1, b'\\xff')").output == "\ufffd"
    assert run_command(["no-such-program-anywhere"]) == Answer("", "not found")
    assert run_command(["bad\0name"]) == Answer("", "not found")


def test_the_pipe_of_a_command_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: opened.append(real(*a, **k)) or opened[-1])
    assert python("print('x')").output == "x\n"
    assert opened[0].stdout and opened[0].stdout.closed


def test_a_command_that_hangs_is_ended() -> None:
    started_s = time.monotonic()
    answer = python("import time; time.sleep(60)", timeout_s=0.2)
    assert answer == Answer("", "no answer within 0.2 s")
    assert time.monotonic() - started_s < 10


def test_a_command_that_closes_its_output_and_lives_on_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); os.write(1, b'x'); os.close(1)"
    assert python(f"{code}; time.sleep(60)") == Answer("x", "did not end after its output")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_command_that_never_stops_talking_is_ended() -> None:
    answer = python("import os\nwhile True: os.write(1, b'y' * 65536)")
    assert answer.problem == "endless output" and len(answer.output) == MAX_TEXT_BYTES


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"a\xff")
    assert read_text(str(tmp_path / "bytes")) == "a\ufffd"
    assert [read_text(path) for path in (str(tmp_path), str(tmp_path / "none"), "a\0b")] == [None] * 3


def test_this_host_has_facts() -> None:
    host = this_host()
    assert host.system == sys.platform and host.memory_counts().total > 2**28
    assert (host.core_counts().logical or 0) >= 1


@pytest.mark.parametrize("features", [set(), {"avx2"}, {"avx2", "avxvnni"}, {*NAMES}, {"dotprod"}, {"avx512vnni"}])
def test_the_instruction_set_is_the_one_the_matmul_chooses(features: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero_ee_cpu_ops import tile_group, tile_kind

    for module in (tile_group, tile_kind):
        monkeypatch.setattr(module, "target_has", lambda context, feature: feature in features)
    emitter = tile_group.Emitter(None, None, tile_kind.LINEAR)
    chosen = [
        (emitter.has_vnni, "AVX-512 VNNI"),
        (emitter.has_vnni_256, "AVX-VNNI"),
        (emitter.has_avx2, "AVX2"),
        (emitter.has_neon_dot, "NEON dot product"),
    ]
    assert instruction_set(features) == next((name for is_it, name in chosen if is_it), "generic")


def test_the_kernels_of_this_process_have_an_instruction_set() -> None:
    assert rank("generic") == 0 < rank("AVX2") < rank("AVX-VNNI") < rank("AVX-512 VNNI")
    assert rank(kernel_instruction_set()) >= 0


MOUNTS = """22 27 0:21 / /proc rw - proc proc rw
27 1 254:0 / / rw - ext4 /dev/vda rw
31 27 0:30 / /mnt rw - tmpfs tmpfs rw
32 27 0:31 / /mnt rw shared:1 - nfs4 server:/x rw
33 27 0:32 / /mnt/my\\040disk rw - fuseblk /dev/sdb1 rw
nonsense
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/", "ext4"), ("/home/x", "ext4"), ("/mnt/a", "nfs4"), ("/mntx", "ext4"), ("/mnt/my disk/a", "fuseblk")],
)
def test_kinds_of_file_systems(folder: str, kind: str) -> None:
    host = recorded({"/proc/self/mountinfo": MOUNTS})
    assert disk._kind(host, folder) == kind
    assert disk._kind(recorded(), folder) == ""


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = disk_info(this_host(), tmp_path / "a" / "b")
    assert 0 < found.free_bytes <= found.total_bytes
    assert existing_folder(tmp_path / "a" / "b") == tmp_path
    try_disk(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_kinds_that_deserve_a_warning() -> None:
    assert [DiskInfo(1, 1, kind).is_network for kind in ("nfs4", "9p", "ext4", "")] == [True, True, False, False]
    assert [DiskInfo(1, 1, kind).is_memory for kind in ("tmpfs", "ext4")] == [True, False]


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(OSError, match="Not a directory"):
            try_disk(folder)


def test_a_disk_without_mmap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="cannot be mapped into memory"):
        try_disk(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_forgets_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: path.open("wb").write(bytes(len(data))))
    with pytest.raises(OSError, match="other bytes than were written"):
        try_disk(tmp_path)


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLock:
        def __init__(self, path: Path, **_: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(disk, "FileLock", NoLock)
    with pytest.raises(OSError, match="a lock can be taken twice"):
        try_disk(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(disk, "FileLock", refuse)
    with pytest.raises(OSError, match="files cannot be locked"):
        try_disk(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_on_which_only_a_file_could_stand_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"files cannot be locked: .*Function not implemented"):
        try_disk(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_command_without_a_thread_to_read_it_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    assert python("print(1)") == Answer("", "can't start new thread")
