"""Faults that others met, by number, with the tests that keep ours from having them; those without one say why.

The numbers stand in the docstrings of many tests too. Here every one is in one place, and this test sees to it that
what is named exists.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
M = "models_app/test_"

#: Start-up on a shared GPU; stop, leftovers, restart; health; sleep, wake and demand; launch to presets.
TESTED: dict[str, tuple[str, ...]] = {
    # B: start-up on a shared GPU
    "B1": (
        M + "pipeline.py::starts_on_one_card_are_one_after_the_other",
        M + "placement.py::old_reading_is_not_believed",
    ),
    "B2": (M + "launch.py::of_starts_claimed_at_once_on_one_card_one_goes_first",),
    "B4": (M + "engines_of_others.py::kvcached_that_did_not_take_hold_is_shown_and_no_limit_is_offered",),
    "B5": (
        "models_app/engines/test_vllm.py::kvcached_gets_a_segment_name_of_this_start",
        "gpus_app/sampler/test_observer.py::one_segment_is_never_counted_for_two",
    ),
    "B7": (
        "models_app/kvcache_addon/test_limits.py::limit_on_an_idle_engine_empties_the_reserve_at_once",
        M + "placement.py::headroom_of_kvcached_is_kept_only_where_it_is_used",
    ),
    "B8": (M + "health.py::idle_engine_that_makes_no_token_is_hung",),
    "B9": (M + "engines_of_others.py::start_that_takes_too_long_fails_and_its_whole_tree_is_ended",),
    "B10": (
        M + "probe.py::port_on_which_somebody_else_listens_too_is_not_ready",
        "models_app/engines/test_process.py::free_port_is_one_that_nobody_has_bound_even_with_reuseport",
    ),
    "B11": (M + "stop.py::stop_is_done_only_when_the_memory_is_back",),
    "B12": (
        M + "probe.py::download_has_a_limit_of_its_own",
        M + "limits_table.py::every_limit_of_time_is_in_the_table",
    ),
    # C: stop, leftovers, restart
    "C2": (M + "stop.py::stop_is_done_only_when_the_memory_is_back",),
    "C4": (
        "models_app/engines/test_process.py::two_guardians_for_one_attempt_start_one_engine",
        M + "launch.py::of_two_workers_that_claim_one_start_one_gets_it",
    ),
    "C5": (
        "models_app/engines/test_process.py::another_installation_is_never_found",
        M + "leftovers.py::claimed_engine_is_never_reaped",
    ),
    "C6": (
        "models_app/engines/test_process.py::children_are_ended_when_the_server_is_killed",
        "contract/test_ending.py::orphans_of_a_killed_server_and_guardian_are_found_and_ended",
    ),
    "C7": (
        M + "pipeline.py::engine_found_running_after_the_worker_was_killed_is_adopted",
        "sardeenz_site/test_faults.py::launcher_that_is_killed_leaves_engines_to_the_next_one",
    ),
    "C10": (M + "stop.py::process_that_outlives_sigkill_is_a_failed_stop_that_names_it",),
    "C14": (
        M + "leftovers.py::segment_of_a_killed_start_is_removed_and_others_are_not",
        M + "leftover_pages.py::segments_without_owner_are_named",
    ),
    "C15": (
        M + "leftovers.py::end_of_the_demo_leaves_nothing_and_keeps_what_is_wanted",
        M + "control.py::stopped_instance_of_a_deployed_model_that_is_wanted_starts_again",
    ),
    "C16": (
        M + "pipeline.py::every_message_lost_and_it_still_becomes_ready",
        M + "pipeline.py::worker_that_died_between_claim_and_start",
    ),
    "C18": (M + "pipeline.py::row_that_says_running_over_a_dead_engine_is_put_right",),
    "C19": (
        M + "leftovers.py::engine_that_no_row_knows_is_an_orphan_and_is_only_named",
        M + "host_loss.py::lost_host_that_returns_ends_what_it_no_longer_owns",
    ),
    # D: health
    "D3": (
        M + "health.py::busy_engine_is_not_killed_by_its_probe",
        M + "health.py::engine_whose_tokens_move_is_never_probed",
    ),
    "D4": ("models_app/router/test_exchange.py::only_what_can_never_fit_the_kv_limit_is_refused",),
    "D5": ("models_app/router/test_exchange.py::dead_engine_of_one_model_does_not_delay_another",),
    "D6": ("models_app/router/test_exchange.py::dead_replica_is_left_alone_after_one_failure",),
    "D7": (
        "models_app/router/test_exchange.py::dead_replica_is_left_alone_after_one_failure",
        "models_app/router/test_exchange.py::first_byte_limit_answers_503_and_is_not_tried_again",
    ),
    "D9": (
        "gpus_app/probes/test_nvml.py::a_card_that_vanishes_without_a_word_is_missed",
        M + "gpu_faults.py::fatal_fault_closes_the_card_and_is_on_record",
        "sardeenz_site/test_gpu_fault.py::xid_closes_the_card_and_moves_the_model_under_its_clients",
    ),
    "D10": (
        "gpus_app/probes/test_nvml.py::a_container_that_lost_its_devices_is_told_to_be_made_anew",
        M + "gpu_faults.py::lesser_faults_take_nobody_new_and_leave_alone_what_runs",
    ),
    # E: sleep, wake, on demand
    "E1": (
        "models_app/kvcache_addon/test_sleep.py::wake_from_level_2_reads_the_weights_before_the_kv_cache",
        M + "sleep_ram.py::wrong_answer_after_waking_is_never_routable",
    ),
    "E2": (M + "sleep.py::request_that_does_not_end_in_time_keeps_it_awake",),
    "E3": (M + "sleep.py::waking_needs_room_and_says_how_much", M + "sleep_ram.py::what_a_sleep_freed_is_shown"),
    "E4": (M + "sleep_ram.py::sleepers_may_keep_half_of_the_hosts_memory_and_are_refused_with_the_numbers",),
    "E5": (M + "launch.py::launch_while_it_is_being_stopped_starts_it_again_after_its_end",),
    "E6": (M + "launch.py::launch_and_stop_at_once_end_in_one_clear_state",),
    "E7": (M + "idle.py::clock_begins_anew_with_each_request", M + "idle.py::at_work_or_too_busy_to_tell_stays"),
    "E8": (
        "gpus_app/policies/test_make_room.py::when_everyone_is_pinned_the_newcomer_is_refused_with_that_reason",
        M + "sleep_ram.py::pinned_model_never_sleeps",
    ),
    "E9": (
        M + "room.py::one_who_has_just_come_up_is_no_victim",
        M + "demand.py::models_that_drive_one_another_out_are_seen_slowed_and_told",
    ),
    "E10": ("models_app/router/test_exchange.py::loaded_model_does_not_wait_behind_a_loading_one",),
    "E11": (M + "demand.py::neighbour_that_has_just_come_up_is_waited_for",),
    "E12": ("models_app/router/test_exchange.py::requests_wait_for_a_model_on_demand_and_join_one_load",),
    "E13": ("models_app/router/test_exchange.py::lists_health_and_metrics_wake_nothing",),
    "E14": ("gpus_app/policies/test_make_room.py::the_smallest_victim_that_is_enough_is_stopped",),
    "E15": ("models_app/router/test_exchange.py::client_that_leaves_leaves_the_queue",),
    "E16": ("models_app/router/test_exchange.py::waiting_stream_gets_comments_and_then_only_what_the_engine_says",),
    "E17": (M + "sleep.py::sleeper_is_not_taken_for_awake", M + "sleep.py::failed_wake_stays_asleep_with_its_reason"),
    "E18": (M + "stop.py::sleeper_whose_model_was_edited_says_which_options_it_wakes_with",),
    "E19": (
        "models_app/kvcache_addon/test_sleep.py::sleeping_twice_is_sleeping_once",
        "models_app/kvcache_addon/test_sleep.py::partial_wake_does_not_serve",
    ),
    "E20": (M + "stop.py::engine_that_dies_of_waking_is_a_crash_and_loaded_anew",),
    # Launch and arguments
    "SZ-008": ("models_app/engines/test_arguments.py::arguments_are_split_as_a_shell_would_and_written_in_full",),
    "SZ-009": ("models_app/engines/test_arguments.py::arguments_are_split_as_a_shell_would_and_written_in_full",),
    "SZ-010": ("models_app/engines/test_arguments.py::a_managed_flag_is_refused_with_its_reason_in_every_spelling",),
    "SZ-012": (
        M + "engines_of_others.py::crash_at_a_stage_is_one_failure",
        "contract/test_failing.py::a_folder_that_is_not_there",
    ),
    "SZ-013": (
        M + "probe.py::engine_that_lists_another_name_is_never_called_ready",
        M + "probe.py::port_on_which_somebody_else_listens_too_is_not_ready",
    ),
    "SZ-014": (M + "pipeline.py::starts_on_one_card_are_one_after_the_other",),
    "SZ-015": (M + "placement.py::second_launch_goes_to_the_other_of_two_equal_cards",),
    "SZ-016": (M + "placement.py::need_that_no_card_has_free_is_refused_with_numbers",),
    "SZ-017": (M + "placement.py::gaps_in_gpu_numbers_are_no_trouble",),
    "SZ-018": (M + "pipeline.py::gpus_chosen_by_hand_are_checked",),
    "SZ-019": ("models_app/engines/test_vllm.py::gpus_are_addressed_by_uuid_in_a_fixed_order",),
    "SZ-021": (M + "models.py::context_left_empty_is_the_models_own",),
    "SZ-022": ("models_app/engines/test_vllm.py::no_secret_of_the_worker_reaches_the_engine",),
    "SZ-025": ("models_app/engines/test_versions.py::pairs_that_cannot_work_are_refused_with_versions_and_reason",),
    # Readiness, progress, errors
    "SZ-029": ("models_app/engines/test_causes.py::cause_on_stdout_wins_over_the_generic_last_error",),
    "SZ-030": ("models_app/engines/test_causes.py::pid_of_a_prefixed_line_is_kept",),
    "SZ-031": ("models_app/engines/test_causes.py::a_harmless_line_that_names_context_or_open_files_is_no_cause",),
    "SZ-032": ("models_app/engines/test_progress.py::engine_core_is_found_in_all_its_spellings",),
    "SZ-033": ("models_app/engines/test_progress.py::an_eager_start_reaches_ready_without_graphs",),
    "SZ-034": ("models_app/engines/test_causes.py::each_known_failure_has_its_sentence_and_advice",),
    "SZ-037": ("models_app/api/test_calls.py::logs_give_as_many_lines_as_asked",),
    "SZ-038": (
        M + "leftovers.py::logs_are_kept_for_a_time_after_the_end",
        M + "logs.py::log_of_every_start_is_downloaded_by_page_and_by_rest",
    ),
    "SZ-039": ("models_app/engines/test_facts.py::chat_template_is_known_from_the_tokenizer_s_files",),
    "SZ-040": (M + "take_over.py::engine_stopped_by_a_signal_is_found_and_started_again",),
    "SZ-041": (
        M + "probe.py::download_does_not_eat_the_start_limit",
        "models_app/engines/test_progress.py::a_download_is_told_apart_from_the_load_that_announced_it",
    ),
    # Unload, orphans, restart
    "SZ-043": (M + "leftovers.py::segment_of_a_killed_start_is_removed_and_others_are_not",),
    "SZ-044": (M + "sleep.py::stop_waits_for_requests_and_cuts_them_at_the_limit",),
    "SZ-048": (M + "leftovers.py::innocent_processes_are_neither_named_nor_ended",),
    "SZ-049": ("models_app/api/test_leftovers.py::reaping_ends_the_orphan_alone",),
    "SZ-051": ("models_app/engines/test_process.py::cleanup_removes_segment_sockets_and_temporary_folder",),
    # Sleep and wake
    "SZ-053": (M + "sleep.py::request_that_does_not_end_in_time_keeps_it_awake",),
    "SZ-055": ("contract/test_addon_real.py::level_2_reads_the_weights_again_before_it_serves",),
    "SZ-056": ("models_app/kvcache_addon/test_sleep.py::partial_wake_does_not_serve",),
    "SZ-059": (M + "presets.py::sleeper_comes_back_asleep", M + "rollout.py::sleeper_stays_a_sleeper"),
    # Move
    "SZ-061": (M + "rollout.py::successor_has_the_models_whole_configuration",),
    "SZ-062": (M + "rollout.py::move_to_a_full_card_is_refused_with_the_way_out",),
    "SZ-063": (
        M + "rollout.py::cancelled_while_draining_the_source_keeps_serving",
        M + "take_over.py::move_cancelled_while_draining_leaves_the_source_serving_and_removes_the_target",
    ),
    "SZ-067": (
        M + "rollout.py::overlapping_cards_are_judged_with_both_copies_in_place",
        M + "stop_then_start.py::what_does_not_fit_beside_itself_starts_there_after_its_end",
    ),
    "SZ-068": (M + "rollout.py::target_that_fails_leaves_the_source_untouched",),
    "SZ-071": (M + "rollout.py::move_to_a_full_card_is_refused_with_the_way_out",),
    # Presets
    "SZ-072": (
        M + "presets.py::saved_and_restored_command_lines_are_identical",
        M + "presets.py::every_option_that_a_model_can_be_given_is_kept",
    ),
    "SZ-073": (M + "presets.py::preset_that_equals_what_runs_restarts_nothing",),
    "SZ-074": (M + "presets.py::half_a_restore_that_fails_is_told_model_by_model",),
    "SZ-075": (M + "presets.py::models_on_shared_cards_are_all_begun_and_the_claim_of_each_card_orders_them",),
    "SZ-076": (M + "presets.py::difference_sees_every_option",),
    "SZ-078": (M + "presets.py::name_that_is_taken_is_a_conflict",),
    # A host that is lost
    "SZ-135": (
        M + "host_loss.py::instances_of_a_lost_host_start_elsewhere",
        M + "host_loss.py::lost_host_that_returns_ends_what_it_no_longer_owns",
        M + "host_loss.py::sleeper_of_a_lost_host_starts_elsewhere_and_sleeps_there",
    ),
}
#: Not tested, and why.
UNTESTED = {
    "C8": "No engine is started in a container by a command of ours: the process that a guardian starts is the engine.",
    "SZ-023": "vLLM chooses the attention backend by the card's capability and keeps a user's choice; we pass none.",
}


@cache
def _tests_in(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def test_(\w+)\(", (HERE / path).read_text(), re.M))


@pytest.mark.parametrize("case", TESTED)
def test_every_case_has_the_tests_that_it_names(case: str) -> None:
    for named in TESTED[case]:
        path, _, name = named.partition("::")
        assert name in _tests_in(path), f"{case}: there is no test_{name} in tests/{path}"


def test_no_case_is_both_tested_and_excused() -> None:
    assert not set(TESTED) & set(UNTESTED)
    assert all(sentence.endswith(".") for sentence in UNTESTED.values())
