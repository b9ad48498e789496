"""Time lines worked out by hand, reproduced exactly by the emulated devices. Numbers: see device_support.py."""

import pytest

from hetero_ee.runtime.devices.device import CPU, GPU
from hetero_ee.runtime.devices.timeline import ROWS_TO_CPU, ROWS_TO_GPU, TO_CPU, TO_GPU, Timeline
from tests.device_support import EmulatedMachine, work


@pytest.fixture
def machine() -> EmulatedMachine:
    return EmulatedMachine()


def test_the_cpu_alone(machine: EmulatedMachine) -> None:
    """One after the other; the host goes along."""
    machine.cpu.run([work("a"), work("b", 2)], lambda: None)
    machine.on_cpu("c")
    assert machine.rows() == [(CPU, "a", 0, 4), (CPU, "b", 4, 12), (CPU, "c", 12, 16)]
    assert machine.timeline.now_s == 16


def test_the_gpu_alone(machine: EmulatedMachine) -> None:
    """The host begins the work and stays where it is until it waits."""
    machine.on_gpu("a")
    done = machine.on_gpu("b", 2)
    assert machine.rows() == [(GPU, "a", 0, 1), (GPU, "b", 1, 3)]
    assert machine.timeline.now_s == 0
    done.wait()
    assert machine.timeline.now_s == 3


def test_a_split_plan(machine: EmulatedMachine) -> None:
    """Embedding on the CPU, first layers on the GPU, the rest and the head on the CPU."""
    machine.on_cpu("embedding")
    arrived = machine.transfer("in", GPU)
    first = machine.on_gpu("first", 4, [arrived])
    back = machine.transfer("out", CPU, [first])
    machine.on_cpu("rest", 2, [back])
    assert machine.rows() == [
        (CPU, "embedding", 0, 4),
        (ROWS_TO_GPU, "in", 4, 4.25),
        (GPU, "first", 4.25, 8.25),
        (ROWS_TO_CPU, "out", 8.25, 8.5),
        (CPU, "rest", 8.5, 16.5),
    ]


def test_a_round_trip(machine: EmulatedMachine) -> None:
    """GPU, CPU, GPU: the host begins the last part at once and waits for its result alone."""
    first = machine.on_gpu("first", 2)
    machine.on_cpu("middle", 1, [machine.transfer("out", CPU, [first])])
    last = machine.on_gpu("last", 2, [machine.transfer("in", GPU)])
    assert machine.timeline.now_s == 6.25
    last.wait()
    assert machine.rows() == [
        (GPU, "first", 0, 2),
        (ROWS_TO_CPU, "out", 2, 2.25),
        (CPU, "middle", 2.25, 6.25),
        (ROWS_TO_GPU, "in", 6.25, 6.5),
        (GPU, "last", 6.5, 8.5),
    ]
    assert machine.timeline.now_s == 8.5


def test_streamed_copies_hide_under_longer_computing(machine: EmulatedMachine) -> None:
    """Copies of 32 bytes take 1, blocks 2: only the first copy is waited for."""
    copied = machine.copy("copy a", 32)
    computed = machine.on_gpu("a", 2, [copied])
    copied = machine.copy("copy b", 32)
    machine.on_gpu("b", 2, [copied])
    copied = machine.copy("copy c", 32, [computed])  # into the buffer of a
    machine.on_gpu("c", 2, [copied])
    assert machine.rows() == [
        (TO_GPU, "copy a", 0, 1),
        (GPU, "a", 1, 3),
        (TO_GPU, "copy b", 1, 2),
        (GPU, "b", 3, 5),
        (TO_GPU, "copy c", 3, 4),
        (GPU, "c", 5, 7),
    ]


def test_a_slow_link_keeps_the_gpu_waiting(machine: EmulatedMachine) -> None:
    """Copies of 160 bytes take 3, blocks 1: the link never rests."""
    for name in "abc":
        machine.on_gpu(name, 1, [machine.copy(f"copy {name}", 160)])
    assert machine.rows() == [
        (TO_GPU, "copy a", 0, 3),
        (GPU, "a", 3, 4),
        (TO_GPU, "copy b", 3, 6),
        (GPU, "b", 6, 7),
        (TO_GPU, "copy c", 6, 9),
        (GPU, "c", 9, 10),
    ]


def test_a_slow_cpu_lets_the_gpu_run_ahead(machine: EmulatedMachine) -> None:
    """The GPU is through with the second chunk before the CPU has finished the first."""
    first = machine.transfer("out 1", CPU, [machine.on_gpu("gpu 1", 2)])
    ahead = machine.on_gpu("gpu 2", 2)
    machine.on_cpu("cpu 1", 2, [first])
    machine.on_cpu("cpu 2", 2, [machine.transfer("out 2", CPU, [ahead])])
    assert machine.rows() == [
        (GPU, "gpu 1", 0, 2),
        (ROWS_TO_CPU, "out 1", 2, 2.25),
        (GPU, "gpu 2", 2, 4),
        (CPU, "cpu 1", 2.25, 10.25),
        (ROWS_TO_CPU, "out 2", 10.25, 10.5),
        (CPU, "cpu 2", 10.5, 18.5),
    ]


def test_what_is_asked_for_later_may_end_earlier(machine: EmulatedMachine) -> None:
    """Lanes are in order, each for itself."""
    late = machine.copy("weights", 224)
    early = machine.on_gpu("a")
    last = machine.on_gpu("b", 1, [late])
    stuck = machine.on_gpu("c")  # needs nothing, and waits behind b
    assert (late.time_s, early.time_s, last.time_s, stuck.time_s) == (4, 1, 5, 6)  # type: ignore[attr-defined]
    early.wait()
    machine.on_cpu("d", 1, [early])
    assert machine.rows()[-1] == (CPU, "d", 1, 5)


def test_both_directions_at_once(machine: EmulatedMachine) -> None:
    machine.copy("weights", 96)
    machine.copy("keys and values", 48, to=CPU)
    machine.copy("more weights", 32)
    assert machine.rows() == [
        (TO_GPU, "weights", 0, 2),
        (TO_CPU, "keys and values", 0, 2),
        (TO_GPU, "more weights", 2, 3),
    ]


def test_a_waiting_host_begins_later(machine: EmulatedMachine) -> None:
    """What the host has not asked for does not run, though the lane is free."""
    early = machine.on_gpu("early")
    machine.on_gpu("a", 2).wait()
    early.wait()  # long since reached
    machine.on_cpu("sampling")
    machine.copy("weights", 32)
    machine.on_gpu("b")
    assert machine.rows() == [
        (GPU, "early", 0, 1),
        (GPU, "a", 1, 3),
        (CPU, "sampling", 3, 7),
        (TO_GPU, "weights", 7, 8),
        (GPU, "b", 7, 8),
    ]


def test_rows_overtake_weights_and_wait_for_rows(machine: EmulatedMachine) -> None:
    machine.copy("weights", 96)
    for name in ("in", "in too"):
        machine.transfer(name, GPU)
    machine.transfer("out", CPU)
    assert machine.rows() == [
        (TO_GPU, "weights", 0, 2),
        (ROWS_TO_GPU, "in", 0, 0.25),
        (ROWS_TO_GPU, "in too", 0.25, 0.5),
        (ROWS_TO_CPU, "out", 0, 0.25),
    ]


def test_more_rows_take_longer(machine: EmulatedMachine) -> None:
    """Two more rows of 128 bytes cross at 32 bytes a second, either way; in a product each takes 1."""
    machine.transfer("in", GPU, n_rows=3)
    machine.transfer("out", CPU, n_rows=3)
    machine.cpu.run([work("a", m=3)], lambda: None)
    assert machine.rows() == [(ROWS_TO_GPU, "in", 0, 8.25), (ROWS_TO_CPU, "out", 0, 8.25), (CPU, "a", 0, 6)]


def test_a_slow_disk_sets_the_pace(machine: EmulatedMachine) -> None:
    """80 bytes at 16 a second; 32 bytes come while the 4 seconds of the product pass."""
    machine.cpu.run([work("a", disk_bytes=80), work("b", disk_bytes=32)], lambda: None)
    assert machine.rows() == [(CPU, "a", 0, 5), (CPU, "b", 5, 9)]


def test_work_without_time_waits_like_any_other_and_is_not_shown(machine: EmulatedMachine) -> None:
    done = machine.gpu.run([], lambda: None, [machine.copy("weights", 32)])[1]
    machine.cpu.run([], lambda: None, [done])
    assert machine.timeline.now_s == 1
    assert machine.rows() == [(TO_GPU, "weights", 0, 1)]


def test_a_run_that_fails_takes_no_time(machine: EmulatedMachine) -> None:
    with pytest.raises(ZeroDivisionError):
        machine.cpu.run([work("a")], lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        machine.link.copy("weights", 32, GPU, lambda: 1 // 0)
    assert machine.rows() == [] and machine.timeline.now_s == 0


def test_results_are_computed_at_once(machine: EmulatedMachine) -> None:
    assert machine.gpu.run([work("a")], lambda: 7)[0] == machine.link.copy("b", 32, GPU, lambda: 7)[0] == 7


def test_not_before(machine: EmulatedMachine) -> None:
    machine.timeline.occupy(GPU, "a", 1, not_before_s=2.5)
    assert machine.rows() == [(GPU, "a", 2.5, 3.5)]


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_time_does_not_run_backwards(seconds: float) -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        Timeline().occupy(GPU, "a", seconds)


def test_events_of_another_time_line_are_refused(machine: EmulatedMachine) -> None:
    with pytest.raises(TypeError, match="not an event of this timeline"):
        machine.on_cpu("a", 1, [EmulatedMachine().on_cpu("b")])
