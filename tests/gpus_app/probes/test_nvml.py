"""NVML: every fault of a card or of the driver is a reading with a sentence, and passes by itself."""

from __future__ import annotations

import pynvml
import pytest

from gpus_app.probes import nvml, xid
from gpus_app.probes.base import GpuProcess
from gpus_app.probes.grades import Grade
from gpus_app.probes.nvml import NvmlProbe
from tests.gpus_app.probes.fake_nvml import GIB, FakeCard, FakeNvml


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def two_cards() -> FakeNvml:
    return FakeNvml(FakeCard("GPU-a", used=12 * GIB), FakeCard("GPU-b", name="NVIDIA L4", total=24 * GIB))


def test_a_sound_card_is_read_whole() -> None:
    fake = two_cards()
    fake.cards[0].processes = [(50, 5 * GIB)]
    probe = NvmlProbe(fake)
    one, two = probe.read()
    assert (one.uuid, one.index, one.name, one.total_bytes) == ("GPU-a", 0, "NVIDIA H200", 141 * GIB)
    assert (one.used_bytes, one.free_bytes) == (12 * GIB, 129 * GIB)
    assert (one.utilization_percent, one.temperature_c, one.power_w, one.power_limit_w) == (93, 61, 512, 700)
    assert one.processes == (GpuProcess(50, "", 5 * GIB),)
    assert two.name == "NVIDIA L4" and two.error is None
    assert probe.driver_version == "580.159.04"


def test_memory_is_read_with_version_2_that_leaves_the_drivers_share_out() -> None:
    fake = two_cards()
    NvmlProbe(fake).read()
    assert fake.calls["memory_v2"] > 0 and "memory_v1" not in fake.calls


def test_an_old_driver_is_read_with_version_1() -> None:
    fake = FakeNvml(FakeCard("GPU-a", used=1, errors={"memory_v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}))
    assert NvmlProbe(fake).read()[0].used_bytes == 1


def test_a_process_in_both_lists_counts_once() -> None:
    fake = FakeNvml(FakeCard("GPU-a", processes=[(5, 100), (6, None)], graphics=[(5, 100), (7, 3)]))
    assert NvmlProbe(fake).read()[0].processes == (
        GpuProcess(5, "", 100),
        GpuProcess(6, "", None),
        GpuProcess(7, "", 3),
    )


def test_a_driver_older_than_the_bindings_names_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(FakeCard("GPU-a", used=GIB))

    def old(card: FakeCard) -> None:
        raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    monkeypatch.setattr(fake, "nvmlDeviceGetComputeRunningProcesses", old)
    (reading,) = NvmlProbe(fake).read()
    assert reading.processes == () and reading.error is None and reading.used_bytes == GIB


@pytest.mark.parametrize("missing", ["utilization", "temperature", "power", "power_limit", "graphics"])
def test_a_figure_that_a_card_does_not_have_is_left_out(missing: str) -> None:
    fake = FakeNvml(FakeCard("GPU-a", errors={missing: pynvml.NVML_ERROR_NOT_SUPPORTED}))
    (reading,) = NvmlProbe(fake).read()
    assert reading.error is None


def test_a_card_that_is_lost_is_a_reading_and_the_other_goes_on(clock: Clock) -> None:
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    fake.cards[0].errors["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
    one, two = probe.read()
    assert one.missing and one.error is not None and "fallen off the bus" in one.error
    assert (one.uuid, one.name, one.used_bytes) == ("GPU-a", "NVIDIA H200", 0)
    assert two.error is None


def test_a_card_that_answers_again_is_back(clock: Clock) -> None:
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    fake.cards[0].errors["*"] = pynvml.NVML_ERROR_UNKNOWN
    assert probe.read()[0].error is not None
    fake.cards[0].errors.clear()
    clock.now += nvml.LOOK_AGAIN_S
    assert probe.read()[0].error is None


def test_a_card_that_vanishes_without_a_word_is_missed(clock: Clock) -> None:
    """D9: no XID line, the driver just lists one less."""
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    gone = fake.cards.pop(0)
    readings = {reading.uuid: reading for reading in probe.read()}
    assert readings["GPU-a"].missing and "lists 1 GPUs" in (readings["GPU-a"].error or "")
    assert readings["GPU-b"].error is None and readings["GPU-b"].index == 0
    fake.cards.insert(0, gone)
    assert [reading.error for reading in probe.read()] == [None, None]


def test_a_container_that_lost_its_devices_is_told_to_be_made_anew(clock: Clock) -> None:
    """D10: restarting the engine does not help, so the sentence says what does."""
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    fake.count_error = pynvml.NVML_ERROR_UNKNOWN
    for reading in probe.read():
        assert reading.error is not None and "container has to be made anew" in reading.error


def test_nvml_is_opened_again_after_a_while_and_not_at_every_look(clock: Clock) -> None:
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    fake.count_error = pynvml.NVML_ERROR_UNKNOWN
    probe.read()
    fake.count_error = None
    before = fake.calls["init"]
    assert all(reading.error for reading in probe.read())
    assert fake.calls["init"] == before
    clock.now += nvml.REOPEN_S
    assert not any(reading.error for reading in probe.read())
    assert fake.calls["init"] == before + 1


def test_a_machine_without_driver_has_no_gpus_and_no_exception(clock: Clock) -> None:
    fake = two_cards()
    fake.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    probe = NvmlProbe(fake, clock=clock)
    assert probe.read() == [] and probe.driver_version == ""
    fake.init_error = None
    clock.now += nvml.REOPEN_S
    assert len(probe.read()) == 2


def test_a_card_that_is_broken_from_the_start_does_not_hide_the_others() -> None:
    fake = two_cards()
    fake.cards[0].errors["handle"] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert [reading.uuid for reading in NvmlProbe(fake).read()] == ["GPU-b"]


def test_an_xid_that_needs_a_reset_puts_the_card_out_of_order_for_good(clock: Clock) -> None:
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    fake.events = [("GPU-a", 79)]
    one, two = probe.read()
    assert one.error is not None and one.error.startswith("XID 79") and two.error is None
    clock.now += 10_000
    assert probe.read()[0].error is not None


def test_an_xid_that_is_a_programs_own_fault_says_nothing_of_the_card(clock: Clock) -> None:
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    fake.events = [("GPU-a", 13), ("GPU-a", 31), ("GPU-a", 43)]
    assert probe.read()[0].error is None


def test_a_passing_xid_is_shown_for_a_while(clock: Clock) -> None:
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    fake.events = [("GPU-b", 94)]
    assert "XID 94" in (probe.read()[1].error or "")
    clock.now += xid.PASSING_S + 1
    assert probe.read()[1].error is None


def test_a_card_that_was_taken_out_and_reset_is_sound_again(clock: Clock) -> None:
    fake = two_cards()
    probe = NvmlProbe(fake, clock=clock)
    probe.read()
    fake.events = [("GPU-b", 48)]
    assert probe.read()[1].error
    card = fake.cards.pop()
    probe.read()
    fake.cards.append(card)
    assert probe.read()[1].error is None


def test_a_driver_without_events_is_read_all_the_same() -> None:
    fake = two_cards()
    fake.no_events = True
    assert [reading.error for reading in NvmlProbe(fake).read()] == [None, None]


def test_no_context_is_made_on_a_card() -> None:
    """E9: NVML alone; nothing here may load CUDA."""
    import sys

    NvmlProbe(two_cards()).read()
    assert not {"torch", "cuda", "cupy"} & set(sys.modules)


@pytest.mark.parametrize(
    ("number", "grade"),
    [
        *[(number, Grade.FATAL) for number in (48, 62, 64, 79, 95, 119, 120, 140, 143)],
        *[(number, Grade.PASSING) for number in (63, 92, 94)],
        *[(number, Grade.NONE) for number in (8, 13, 31, 32, 43, 45, 68, 69, 9999)],
    ],
)
def test_xids_are_graded_by_what_nvidias_catalogue_says_to_do(number: int, grade: Grade) -> None:
    """Reset or restart of the machine; worth showing; restart of the program, or nothing."""
    fake = two_cards()
    probe = NvmlProbe(fake)
    probe.read()
    fake.events = [("GPU-a", number)]
    assert probe.read()[0].grade is grade


def test_fatal_xid_is_not_covered_by_a_later_passing_one() -> None:
    fake = two_cards()
    probe = NvmlProbe(fake)
    probe.read()
    fake.events = [("GPU-a", 48), ("GPU-a", 63)]
    assert "XID 48" in (probe.read()[0].error or "")


@pytest.mark.parametrize(
    ("code", "grade"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, Grade.FATAL),
        (pynvml.NVML_ERROR_RESET_REQUIRED, Grade.FATAL),
        (pynvml.NVML_ERROR_UNKNOWN, Grade.BLIND),
        (pynvml.NVML_ERROR_TIMEOUT, Grade.BLIND),
    ],
)
def test_errors_of_nvml_are_graded(code: int, grade: Grade) -> None:
    fake = two_cards()
    probe = NvmlProbe(fake)
    probe.read()
    fake.cards[0].errors["*"] = code
    assert probe.read()[0].grade is grade


def test_driver_that_fails_as_a_whole_condemns_no_card() -> None:
    fake = two_cards()
    probe = NvmlProbe(fake)
    probe.read()
    fake.count_error = pynvml.NVML_ERROR_UNKNOWN
    assert [reading.grade for reading in probe.read()] == [Grade.BLIND, Grade.BLIND]


def test_card_missing_from_the_list_is_fatal() -> None:
    fake = two_cards()
    probe = NvmlProbe(fake)
    probe.read()
    fake.cards.pop(0)
    assert probe.read()[1].grade is Grade.FATAL or probe.read()[0].grade is Grade.FATAL
