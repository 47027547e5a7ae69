"""The suite fails every backend of tests/broken, by a test whose name says what is broken, and passes the sound ones.

`EXPERTSTREAM_SUITE_RUNS=10` in the environment runs it ten times over each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import metadata

import pytest

from suite_runs import SOUND, STRANGER, SuiteRun, broken_backends, install_broken, run_suite

RUN_COUNT = int(os.environ.get("EXPERTSTREAM_SUITE_RUNS", "1"))
RUNS_AT_ONCE = 3
"""A run mostly waits for copies that are late on purpose."""

CAUGHT_BY = {
    "addressable_but_late": "test_addressable_memory_is_committed_at_once",
    "alignment_ignored": "test_slots_and_staging_are_aligned",
    "allocation_retries_for_ever": "test_memory_that_cannot_be_had_is_refused",
    "budget_above_what_was_asked": "test_a_budget_is_never_more_than_was_asked",
    "budget_ignores_resident_bytes": "test_a_budget_shrinks_by_what_is_resident",
    "budget_ignores_the_size": "test_a_budget_counts_in_slots_of_the_size_asked_about",
    "budget_never_zero": "test_zero_slots_asked_for_are_zero_slots",
    "budget_without_numbers": "test_a_budget_says_why_in_numbers",
    "close_abandons_readers": "test_close_waits_for_announced_reads",
    "close_does_not_wait": "test_close_waits_for_commits_under_way",
    "close_leaks_memory": "test_close_gives_the_memory_back",
    "close_leaks_threads": "test_close_ends_the_stores_threads",
    "close_twice_fails": "test_closing_twice_does_nothing",
    "commit_answers_none": "test_a_commit_is_answered_with_a_commit",
    "commit_leaks_its_staging": "test_committed_staging_is_lent_again",
    "commit_ready_too_soon": "test_kernels_read_the_bytes_that_were_committed",
    "commit_waits_for_readers": "test_neither_a_commit_nor_its_ordering_nor_a_mark_makes_the_host_wait",
    "commits_lost_under_threads": "test_eight_fillers_at_once_lose_no_commit",
    "device_error_swallowed": "test_a_commit_that_failed_says_so",
    "discard_leaks": "test_discarded_staging_is_lent_again",
    "done_too_soon": "test_a_commit_that_is_done_shows_its_bytes",
    "driver_error_escapes": "test_memory_that_cannot_be_had_is_refused",
    "event_after_the_first_chunk": "test_kernels_read_the_bytes_that_were_committed",
    "failed_commit_is_done": "test_a_commit_that_failed_is_never_done",
    "failed_commit_leaks": "test_a_commit_that_failed_gives_its_staging_back",
    "fewer_slots_than_asked": "test_a_store_has_the_layout_and_the_slots_asked_for",
    "in_place_ignores_readers": "test_a_refill_waits_for_the_reader",
    "lends_after_close": "test_a_closed_store_lends_nothing",
    "mark_read_blocks_the_host": "test_neither_a_commit_nor_its_ordering_nor_a_mark_makes_the_host_wait",
    "mark_read_ignored": "test_a_refill_waits_for_the_reader",
    "negative_slot_wraps_round": "test_a_slot_that_does_not_exist_is_not_staged",
    "only_the_last_reader_counts": "test_a_refill_waits_for_the_readers_of_every_stream",
    "order_before_blocks_the_host": "test_neither_a_commit_nor_its_ordering_nor_a_mark_makes_the_host_wait",
    "order_before_ignored": "test_a_read_ordered_after_a_commit_sees_its_bytes",
    "part_offset_off_by_one": "test_parts_that_are_not_whole_pages_arrive_at_their_own_offsets",
    "reads_after_close": "test_a_closed_store_shows_nothing",
    "refused_allocation_leaks": "test_a_refused_allocation_leaves_nothing_behind",
    "seed_invents_experts": "test_every_seed_is_one_of_the_hottest",
    "seed_longer_than_asked": "test_seeds_are_no_more_than_the_slots",
    "seed_repeats": "test_no_seed_is_named_twice",
    "slots_overlap": "test_slots_do_not_overlap",
    "staging_lent_too_soon": "test_staging_is_not_lent_again_before_its_copy_ended",
    "staging_misaligned": "test_slots_and_staging_are_aligned",
    "stale_parts_after_reuse": "test_a_refill_leaves_no_stale_bytes",
    "stores_share_slots": "test_two_stores_keep_apart",
    "tail_not_copied": "test_kernels_read_the_bytes_that_were_committed",
    "unchanged_pages_skipped": "test_a_refill_that_differs_in_one_byte_shows_that_byte",
    "view_dies_early": "test_a_view_lives_and_stays_in_place_while_its_slot_is_refilled",
    "view_is_a_copy": "test_a_view_lives_and_stays_in_place_while_its_slot_is_refilled",
    "wait_returns_at_once": "test_kernels_read_the_bytes_that_were_committed",
    "wrong_slot": "test_each_slot_holds_its_own_expert",
}
NEVER_RETURN = {"allocation_retries_for_ever", "commit_leaks_its_staging", "discard_leaks", "failed_commit_leaks"}

SOUND_BACKENDS = ("cpu", "metal_compat", "fakedevice", *SOUND)

Runs = dict[str, list[Future[SuiteRun]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs of each backend: of a broken one only the test that must catch it, of a sound one everything."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("anywhere")
    install_broken(site)
    with ThreadPoolExecutor(RUNS_AT_ONCE) as pool:

        def start(backend: str, *arguments: str, is_plain: bool = False) -> list[Future[SuiteRun]]:
            run = partial(run_suite, backend, *arguments, folder=folder, site=site, is_plain=is_plain)
            return [pool.submit(run) for _ in range(RUN_COUNT)]

        started = {backend: start(backend) for backend in SOUND_BACKENDS}
        for backend, test in CAUGHT_BY.items():
            limit = ["--test-limit-s", "5"] if backend in NEVER_RETURN else []
            started[backend] = start(backend, "-k", test, *limit, is_plain=True)
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
