"""The suite fails every backend of tests/broken, by a test whose name says what is broken, and passes the sound ones.

`EXPERTSTREAM_SUITE_RUNS=10` in the environment runs it ten times over each. The first run of each sound backend, and of
a broken one of each kind, is of the command itself; the others are forked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata

import pytest

from suite_runs import SOUND, STRANGER, SuiteRun, broken_backends, install_broken, run_suite, suite_servers

RUN_COUNT = int(os.environ.get("EXPERTSTREAM_SUITE_RUNS", "1"))
RUNS_AT_ONCE = 3
"""A run mostly waits for copies that are late on purpose."""

CAUGHT_BY = {
    "addressable_but_late": "test_addressable_memory_is_committed_at_once",
    "alignment_ignored": "test_slots_and_staging_are_aligned",
    "allocation_retries_for_ever": "test_memory_that_cannot_be_had_is_refused",
    "budget_above_what_was_asked": "test_a_budget_is_never_more_than_was_asked",
    "budget_ignores_other_slots": "test_slots_granted_beside_slots_of_another_size_can_be_allocated_with_them",
    "budget_ignores_resident_bytes": "test_a_budget_shrinks_by_what_is_resident",
    "budget_ignores_the_size": "test_a_budget_counts_in_slots_of_the_size_asked_about",
    "budget_never_zero": "test_zero_slots_asked_for_are_zero_slots",
    "budget_without_numbers": "test_a_budget_says_why_in_numbers",
    "close_abandons_readers": "test_close_waits_for_announced_reads",
    "close_does_not_wait": "test_close_waits_for_commits_under_way",
    "close_leaks_descriptors": "test_close_gives_descriptors_back",
    "close_leaks_memory": "test_close_gives_the_memory_back",
    "close_leaks_staging": "test_close_gives_the_memory_back",
    "close_leaks_threads": "test_close_ends_the_stores_threads",
    "close_twice_fails": "test_closing_twice_does_nothing",
    "commit_answers_none": "test_a_commit_is_answered_with_a_commit",
    "commit_leaks_its_staging": "test_committed_staging_is_lent_again",
    "commit_ready_too_soon": "test_kernels_read_the_bytes_that_were_committed",
    "commit_waits_for_readers": "test_a_commit_does_not_wait_for_announced_reads",
    "commits_lost_under_threads": "test_eight_fillers_at_once_lose_no_commit",
    "commits_overtake": "test_refills_of_one_slot_land_in_the_order_of_their_commits",
    "copies_lost_until_missed": "test_any_order_of_calls_leaves_the_last_committed_expert",
    "describes_other_memory": "test_views_are_memory_of_the_type_that_was_described",
    "device_error_swallowed": "test_a_commit_that_failed_says_so",
    "discard_leaks": "test_discarded_staging_is_lent_again",
    "done_too_soon": "test_a_commit_that_is_done_shows_its_bytes",
    "done_waits": "test_asking_whether_a_commit_is_done_does_not_wait_for_its_copy",
    "driver_error_escapes": "test_memory_that_cannot_be_had_is_refused",
    "event_after_the_first_chunk": "test_kernels_read_the_bytes_that_were_committed",
    "failed_commit_is_done": "test_a_commit_that_failed_is_never_done",
    "failed_commit_leaks": "test_a_commit_that_failed_gives_its_staging_back",
    "fewer_slots_than_asked": "test_a_store_has_the_layout_and_the_slots_asked_for",
    "in_place_budgets_staging": "test_a_new_store_pins_no_more_than_its_budget_says",
    "in_place_ignores_readers": "test_a_refill_waits_for_the_reader",
    "launch_waits_for_the_read": "test_a_launch_does_not_wait_for_its_read",
    "launched_read_reads_at_once": "test_a_launched_read_sees_what_is_there_when_its_time_is_over",
    "lends_after_close": "test_a_closed_store_lends_nothing",
    "mark_read_blocks_the_host": "test_a_mark_does_not_wait_for_the_reads_that_it_announces",
    "mark_read_ignored": "test_a_refill_waits_for_the_reader",
    "negative_slot_wraps_round": "test_a_slot_that_does_not_exist_is_not_staged",
    "only_the_last_reader_counts": "test_a_refill_waits_for_the_readers_of_every_stream",
    "order_before_blocks_the_host": "test_ordering_a_stream_after_a_commit_does_not_wait_for_its_copy",
    "order_before_hides_failure": "test_nothing_is_ordered_after_a_commit_that_is_known_to_have_failed",
    "order_before_ignored": "test_a_read_ordered_after_a_commit_sees_its_bytes",
    "part_offset_off_by_one": "test_parts_that_are_not_whole_pages_arrive_at_their_own_offsets",
    "reads_after_close": "test_a_closed_store_shows_nothing",
    "refused_allocation_leaks": "test_a_refused_allocation_leaves_nothing_behind",
    "scarce_staging_lent_twice": "test_a_store_makes_do_with_the_staging_that_can_be_had",
    "seed_invents_experts": "test_every_seed_is_one_of_the_hottest",
    "seed_longer_than_asked": "test_seeds_are_no_more_than_the_slots",
    "seed_repeats": "test_no_seed_is_named_twice",
    "slots_overlap": "test_slots_do_not_overlap",
    "slots_without_staging_leak": "test_a_store_that_can_have_no_staging_gives_its_slots_back",
    "staging_given_up_at_once": "test_a_store_makes_do_with_the_staging_that_can_be_had",
    "staging_lent_too_soon": "test_staging_is_not_lent_again_before_its_copy_ended",
    "staging_misaligned": "test_slots_and_staging_are_aligned",
    "staging_retried_for_ever": "test_a_store_that_can_have_no_staging_is_refused",
    "stale_parts_after_reuse": "test_a_refill_leaves_no_stale_bytes",
    "stores_share_readers": "test_stores_keep_their_readers_apart",
    "stores_share_slots": "test_two_stores_keep_apart",
    "tail_not_copied": "test_kernels_read_the_bytes_that_were_committed",
    "tier_close_abandons_keep": "test_close_waits_for_copies_into_host_slots",
    "tier_close_leaks": "test_close_gives_the_memory_of_host_slots_back",
    "tier_commit_waits_for_keep": "test_nothing_waits_for_the_bytes_of_a_host_slot_on_their_way",
    "tier_committed_shares_staging": "test_a_host_slot_is_lent_to_nobody_else_when_its_lease_has_ended",
    "tier_discard_forgets_copies": "test_a_discard_hides_no_copy_under_way_from_the_next_lease",
    "tier_discard_leaks": "test_a_host_slot_is_lent_again_and_again",
    "tier_failed_commit_poisons": "test_a_host_slot_is_lent_again_after_a_commit_from_it_failed",
    "tier_fewer_than_asked": "test_host_slots_are_as_many_as_asked_for",
    "tier_keep_behind_the_refill": "test_keep_takes_the_bytes_that_the_slot_has",
    "tier_keep_blocks": "test_keep_does_not_wait",
    "tier_keep_ignored": "test_keep_takes_the_bytes_that_the_slot_has",
    "tier_keep_overtakes": "test_keep_does_not_overtake_the_copy_out_of_its_host_slot",
    "tier_keep_too_late": "test_keep_takes_the_bytes_of_a_slot_that_is_being_read",
    "tier_keep_waits_for_its_copy": "test_keep_does_not_wait",
    "tier_keep_waits_for_readers": "test_keep_does_not_wait",
    "tier_keep_waits_for_the_copy_out": "test_keep_does_not_wait",
    "tier_kept_done_too_soon": "test_a_commit_of_kept_bytes_that_is_done_shows_them",
    "tier_kept_failure_swallowed": "test_a_commit_of_kept_bytes_that_failed_says_so_whatever_is_asked",
    "tier_kept_ignores_readers": "test_a_refill_with_kept_bytes_waits_for_the_reader",
    "tier_kept_order_before_ignored": "test_a_read_ordered_after_a_commit_of_kept_bytes_sees_them",
    "tier_later_piece_forgotten": "test_a_host_slot_is_lent_to_nobody_else_when_its_lease_has_ended",
    "tier_lent_under_a_copy": "test_a_host_slot_is_not_lent_before_the_copies_out_of_it_have_ended",
    "tier_lent_under_a_keep": "test_a_host_slot_is_not_lent_before_the_copy_into_it_has_ended",
    "tier_measures_in_slots": "test_a_store_measures_what_its_slots_take",
    "tier_measures_slots_alone": "test_a_store_measures_what_its_host_slots_take",
    "tier_misaligned": "test_host_slots_are_aligned",
    "tier_mixed_up_under_threads": "test_eight_fillers_at_once_mix_up_no_host_slots",
    "tier_names_the_host_slot": "test_a_host_slot_is_writable_bytes_for_the_whole_slot_asked_for",
    "tier_negative_row": "test_a_host_slot_or_slot_that_does_not_exist_is_refused",
    "tier_pieces_overlap": "test_host_slots_overlap_with_nothing_else_that_is_lent",
    "tier_refusal_counted": "test_a_store_goes_on_after_host_slots_were_refused",
    "tier_refusal_is_final": "test_half_of_the_host_slots_are_had_where_all_of_them_cannot_be",
    "tier_refusal_leaks": "test_refused_host_slots_leave_nothing_behind",
    "tier_refusal_without_numbers": "test_host_slots_that_cannot_be_had_are_refused",
    "tier_restage_before_keep": "test_what_keep_takes_is_committed_without_a_wait",
    "tier_restage_blocks": "test_nothing_waits_for_the_bytes_of_a_host_slot_on_their_way",
    "tier_restage_names_another_slot": "test_kept_bytes_are_lent_for_the_slot_asked_for",
    "tier_restage_waits_for_keep": "test_nothing_waits_for_the_bytes_of_a_host_slot_on_their_way",
    "tier_restages_after_close": "test_host_slots_of_a_closed_store_lend_and_take_nothing",
    "tier_rewrites_after_commit": "test_what_was_committed_from_a_host_slot_is_committed_again",
    "tier_shares_staging": "test_a_host_slot_is_lent_to_nobody_else_when_its_lease_has_ended",
    "tier_staging_understated": "test_a_new_store_pins_no_more_than_its_budget_says",
    "tier_stores_share_rows": "test_two_stores_host_slots_keep_apart",
    "tier_takes_staging": "test_host_slots_need_none_of_the_stores_staging",
    "tier_wrong_row": "test_each_host_slot_of_each_piece_keeps_its_own_expert",
    "unchanged_pages_skipped": "test_a_refill_that_differs_in_one_byte_shows_that_byte",
    "view_dies_early": "test_a_view_lives_and_stays_in_place_while_its_slot_is_refilled",
    "view_is_a_copy": "test_a_view_lives_and_stays_in_place_while_its_slot_is_refilled",
    "wait_returns_at_once": "test_kernels_read_the_bytes_that_were_committed",
    "wrong_slot": "test_each_slot_holds_its_own_expert",
}
NEVER_RETURN = {
    "allocation_retries_for_ever",
    "commit_leaks_its_staging",
    "discard_leaks",
    "failed_commit_leaks",
    "staging_retried_for_ever",
    "tier_discard_leaks",
    "tier_takes_staging",
}
BY_COMMAND = {"copies_lost_until_missed", "discard_leaks", "wrong_slot"}
"""Broken backends of each kind: seldom, for ever, always."""

SOUND_BACKENDS = ("cpu", "metal_compat", "fakedevice", *SOUND)

Runs = dict[str, list[Future[SuiteRun]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs of each backend: of a broken one only the test that must catch it, of a sound one everything."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("anywhere")
    install_broken(site)
    with suite_servers(RUNS_AT_ONCE, site) as servers, ThreadPoolExecutor(RUNS_AT_ONCE) as pool:

        def start(backend: str, *arguments: str, by_command: bool) -> list[Future[SuiteRun]]:
            commands = 1 if by_command else 0
            return [
                *(pool.submit(run_suite, backend, *arguments, folder=folder, site=site) for _ in range(commands)),
                *(pool.submit(servers.run, backend, *arguments, folder=folder) for _ in range(commands, RUN_COUNT)),
            ]

        started = {backend: start(backend, by_command=True) for backend in SOUND_BACKENDS}
        for backend, test in CAUGHT_BY.items():
            limit = ["--test-limit-s", "5"] if backend in NEVER_RETURN else []
            started[backend] = start(backend, "-k", test, *limit, by_command=backend in BY_COMMAND)
        yield started
        pool.shutdown(cancel_futures=True)


def test_the_stranger_is_installed_by_pip_like_any_distribution() -> None:
    found = metadata.entry_points(group="expertstream.backends", name="fakedevice")
    assert [entry.dist and entry.dist.name for entry in found] == ["expertstream-fakedevice"], (
        f"pip install --editable {STRANGER}"
    )


@pytest.mark.parametrize("backend", SOUND_BACKENDS)
def test_a_sound_backend_passes(runs: Runs, backend: str) -> None:
    for run in runs[backend]:
        ended = run.result()
        assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize("backend", CAUGHT_BY)
def test_a_broken_backend_fails_by_the_test_that_names_its_fault(runs: Runs, backend: str) -> None:
    for run in runs[backend]:
        ended = run.result()
        assert ended.exit_code == 1, ended.output
        assert CAUGHT_BY[backend] in ended.failed, ended.output
        assert ("stands here" in ended.output) == (backend in NEVER_RETURN), ended.output


def test_every_broken_backend_is_here() -> None:
    assert sorted(CAUGHT_BY) == broken_backends()
