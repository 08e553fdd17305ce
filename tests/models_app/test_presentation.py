"""How things are said and drawn: status words, memory bars, meters, frames, folders, log lines."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from django.utils import timezone

from models_app.models import COLOUR_SLOTS
from models_app.presentation import kv_meter, words
from models_app.presentation.folders import browse
from models_app.presentation.frames import compact, encode
from models_app.presentation.limits import preview
from models_app.presentation.log_lines import log_lines
from models_app.presentation.memory_bar import Bar, Share, render, with_distinct_slots
from models_app.states import InstanceState, LimitStatus, Stage
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model


def share(number: int, **fields: Any) -> Share:
    defaults: dict[str, Any] = {"key": f"i{number}", "label": f"model-{number}", "slot": number, "limit_bytes": 8 * GIB}
    held = {"baseline_bytes": 2 * GIB, "used_bytes": 3 * GIB, "prealloc_bytes": GIB}
    return Share(**(defaults | held | fields))


def bar(*shares: Share, **fields: Any) -> Bar:
    return Bar(uuid="GPU-1", title="GPU 0", total_bytes=80 * GIB, shares=shares, **fields)


# --- words -----------------------------------------------------------------------------------------


def test_at_most_ten_words_say_what_an_instance_does() -> None:
    found = {*words.STATE_WORDS.values(), words.STUCK}
    assert len({word.text for word in found}) <= 10


def test_every_state_has_a_word() -> None:
    assert set(words.STATE_WORDS) == set(InstanceState)


def test_every_limit_status_has_a_word() -> None:
    assert set(words.LIMIT_WORDS) == set(LimitStatus)


def test_no_two_state_words_share_an_icon() -> None:
    found = list({*words.STATE_WORDS.values(), words.STUCK})
    assert len({word.icon for word in found}) == len(found)


def test_a_ready_instance_that_hangs_is_called_stuck(db: None) -> None:
    assert words.state_word(make_instance(health="stuck")) is words.STUCK


def test_a_failure_shows_its_first_cause_before_its_last_reason(db: None) -> None:
    row = make_instance(state="failed", reason="exit code 1", first_cause="Out of GPU memory.")
    assert words.why(row) == "Out of GPU memory."


def test_a_failure_that_restarts_by_itself_says_when(db: None) -> None:
    row = make_instance(state="failed", next_restart_at=timezone.now() + timedelta(seconds=40))
    assert words.next_step(row).startswith("Restarts by itself in ")


def test_the_stepper_marks_the_stage_under_way_with_its_percent(db: None) -> None:
    row = make_instance(state="starting", stage=Stage.LOADING_WEIGHTS, stage_progress=0.62)
    found = words.steps(row)
    assert [step.state for step in found] == ["done", "done", "now", "todo", "todo", "todo"]
    assert found[2].percent == 62


def test_the_stepper_of_a_failed_start_marks_where_it_ended(db: None) -> None:
    row = make_instance(state="failed", stage=Stage.COMPILING)
    assert [step.state for step in words.steps(row)] == ["done", "done", "done", "failed", "todo", "todo"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0.0 GiB"), (512 * 1024**2, "512 MiB"), (int(58.94 * GIB), "58.9 GiB"), (300, "300 bytes")],
)
def test_sizes_carry_their_unit(value: int | None, text: str) -> None:
    assert words.size(value) == text


# --- bars ------------------------------------------------------------------------------------------


def test_a_bar_has_no_inline_style_and_no_script() -> None:
    text = render(bar(share(0), share(1), other_bytes=GIB, reserve_bytes=8 * GIB))
    assert "style=" not in text
    assert "<script" not in text
    assert not re.search(r"\son\w+=", text)


def test_names_in_a_bar_are_escaped() -> None:
    text = render(bar(share(0, label='<b>"x"')))
    assert "<b>" not in text
    assert '"x"' not in text.replace("&quot;", "")


def test_nine_instances_on_one_gpu_can_be_told_apart() -> None:
    shares = with_distinct_slots([share(number) for number in range(9)])
    assert len({(one.hue, one.pattern) for one in shares}) == 9


def test_two_instances_with_one_colour_get_different_ones_in_a_picture() -> None:
    first, second = with_distinct_slots([share(3), share(3, key="i9")])
    assert first.slot == 3
    assert second.slot != 3


def test_the_parts_of_a_bar_fill_the_card() -> None:
    text = render(bar(share(0), share(1), other_bytes=GIB))
    widths = [float(one) for one in re.findall(r'width="([\d.]+)%" height="34" class="fill"', text)]
    assert sum(widths) == pytest.approx(100, abs=0.05)


def test_every_part_can_be_reached_by_keyboard_and_one_is_the_tab_stop() -> None:
    text = render(bar(share(0), share(1)))
    assert text.count('tabindex="0"') == 1
    assert text.count('tabindex="-1"') >= 6


def test_a_limit_that_is_exceeded_drops_a_line_into_the_bar() -> None:
    assert "lane-drop" in render(bar(share(0, limit_bytes=2 * GIB)))
    assert "lane-drop" not in render(bar(share(0, limit_bytes=20 * GIB)))


def test_each_instance_has_a_lane_of_its_own_so_labels_cannot_collide() -> None:
    text = render(bar(*[share(number) for number in range(4)]))
    rows = re.findall(r'class="lane-text" x="[\d.]+%" y="(\d+)"', text)
    assert len(rows) == len(set(rows)) == 4


def test_bytes_promised_to_a_start_are_drawn_beside_what_it_holds() -> None:
    assert bar(share(0, reserved_bytes=10 * GIB)).promised_bytes == 4 * GIB
    assert "seg-promised" in render(bar(share(0, reserved_bytes=10 * GIB)))


def test_a_gpu_without_a_reading_is_drawn_as_unknown() -> None:
    assert "no reading" in render(bar(known=False))


def test_a_bar_says_in_words_what_it_shows() -> None:
    text = bar(share(0), other_bytes=GIB).sentence
    assert "model-0: weights 2.0, KV used 3.0, KV mapped idle 1.0, limit 8.0" in text
    assert "other processes 1.0" in text
    assert "free 73.0 of 80.0" in text


def test_less_free_than_the_reserve_is_near_full() -> None:
    full = share(0, baseline_bytes=70 * GIB)
    assert bar(full, reserve_bytes=8 * GIB).near_full
    assert not bar(share(0), reserve_bytes=8 * GIB).near_full


def test_a_meter_shows_the_part_over_the_limit() -> None:
    assert 'data-part="over"' in kv_meter.render(share(0, limit_bytes=2 * GIB))
    assert 'data-part="over"' not in kv_meter.render(share(0))


def test_new_instances_wear_different_colours(db: None) -> None:
    gpu = make_gpu(host=make_host())
    slots = [make_instance(gpus=[gpu]).colour_slot for _ in range(9)]
    assert len(set(slots)) == 9


def test_an_instance_keeps_its_colour_when_another_ends(db: None) -> None:
    gpu = make_gpu(host=make_host())
    first, second = make_instance(gpus=[gpu]), make_instance(gpus=[gpu])
    first.state = InstanceState.STOPPED
    first.save()
    third = make_instance(gpus=[gpu])
    second.refresh_from_db()
    assert second.colour_slot == 1
    assert third.colour_slot == 0
    assert COLOUR_SLOTS == 32


# --- limits said before they are set ---------------------------------------------------------------


def test_a_limit_below_the_floor_is_blocked_until_it_is_forced(db: None) -> None:
    row = make_instance(safety_floor_bytes=2 * GIB, hard_minimum_bytes=GIB // 4, bundle_bytes=1)
    asked = GIB
    assert preview(row, asked, force=False, reclaim="wait", card=None).blocked
    assert not preview(row, asked, force=True, reclaim="wait", card=None).blocked


def test_a_limit_below_the_hard_minimum_is_blocked_even_by_force(db: None) -> None:
    row = make_instance(hard_minimum_bytes=GIB, bundle_bytes=1)
    assert preview(row, GIB // 2, force=True, reclaim="wait", card=None).blocked


def test_a_limit_above_capacity_is_said_to_be_cut(db: None) -> None:
    found = preview(make_instance(capacity_bytes=40 * GIB), 50 * GIB, force=False, reclaim="wait", card=None)
    assert "40.0 GiB" in found.warnings[0]


# --- frames, folders, logs -------------------------------------------------------------------------

RECORD: dict[str, Any] = {
    "type": "sample",
    "host": "gpu-a",
    "t": 100.0,
    "seq": 7,
    "gpus": [
        {
            "uuid": "GPU-1",
            "total": 80 * GIB,
            "used": GIB,
            "other": GIB,
            "other_processes": [{"pid": 1, "name": "secret-tool", "bytes": GIB}],
            "instances": [{"id": 3, "used": 5, "prealloc": 1, "resident": 9, "ipc": "sz-x", "running": 1}],
        }
    ],
}


def test_a_frame_leaves_out_what_pages_do_not_draw() -> None:
    text = orjson.dumps(compact(RECORD)).decode()
    assert "secret-tool" not in text
    assert "sz-x" not in text
    assert compact(RECORD)["gpus"][0]["instances"][0]["used"] == 5


def test_a_record_is_encoded_once_for_all_browsers() -> None:
    assert encode(dict(RECORD)) is encode(dict(RECORD))


def test_browsing_stays_inside_the_roots(tmp_path: Path, settings: Any) -> None:
    root, outside = tmp_path / "models", tmp_path / "private"
    (root / "qwen").mkdir(parents=True)
    (root / "qwen" / "config.json").write_text("{}")
    outside.mkdir()
    (root / "escape").symlink_to(outside)
    settings.SARDEENZ_MODEL_ROOTS = [root]
    listing = browse("")
    assert [(entry.name, entry.is_model) for entry in listing.entries] == [("qwen", True)]
    assert browse(str(root / ".." / "private")).error
    assert browse(str(root / "escape")).error


def test_a_link_to_another_folder_of_the_roots_is_listed(tmp_path: Path, settings: Any) -> None:
    root = tmp_path / "models"
    (root / "real").mkdir(parents=True)
    (root / "alias").symlink_to(root / "real")
    settings.SARDEENZ_MODEL_ROOTS = [root]
    assert {entry.name: entry.path for entry in browse("").entries}["alias"] == str(root / "real")


def test_errors_in_a_log_are_marked_and_terminal_colours_taken_out() -> None:
    found = log_lines(["\x1b[32mINFO\x1b[0m fine", "WARNING late", "RuntimeError: out of memory"])
    assert [line.tone for line in found] == ["", "warn", "bad"]
    assert found[0].text == "INFO fine"


def test_the_label_names_the_replica_where_there_can_be_several(db: None) -> None:
    from models_app.presentation.board import label_of

    model = make_model(served_model_name="phi", replicas=2)
    assert label_of(make_instance(model=model, replica_index=1)) == "phi #1"
    assert label_of(make_instance(model=make_model(served_model_name="solo"))) == "solo"
