"""The worker pool: each task once, nobody touches what is over, and no thread is left."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
from collections.abc import Callable

import numba
import numpy as np
import pytest

from expertstream.errors import MachineError, UsageError
from expertstream_engine.kernels.native import atomic_add, atomic_load, cfunc, sched_yield, words_at
from expertstream_engine.kernels.pool import _NUMBER, _OPEN, WorkerPool, _join

THREADS = (1, 2, 3, 8)
NEXT, TASKS, RESULTS, SEATS, WANTED = range(5)


@cfunc("void(int64)")
def claim(args: int) -> None:
    """Task t adds t + 1 to word t at address RESULTS."""
    block = words_at(args)
    results = words_at(block[RESULTS])
    while True:
        task = atomic_add(args, 1)
        if task >= block[TASKS]:
            return
        results[task] += task + 1


@cfunc("void(int64)")
def meet(args: int) -> None:
    """Leaves when WANTED threads are in the job."""
    atomic_add(args + 8 * SEATS, 1)
    while atomic_load(args + 8 * SEATS) < words_at(args)[WANTED]:
        sched_yield()


def block_for(tasks: int, results: np.ndarray) -> np.ndarray:
    return np.array([0, tasks, results.ctypes.data, 0, 0], np.int64)


@cfunc("void(int64)")
def stay(args: int) -> None:
    """Takes a seat, leaves when WANTED is not 0, and says so in RESULTS as the last thing it does."""
    atomic_add(args + 8 * SEATS, 1)
    while atomic_load(args + 8 * WANTED) == 0:
        sched_yield()
    atomic_add(args + 8 * RESULTS, 1)


def compute_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("expertstream-compute")]


@pytest.mark.parametrize("threads", THREADS)
def test_each_task_of_each_job_runs_once_and_is_seen_when_run_returns(threads: int) -> None:
    results = np.zeros(64, np.int64)
    block = block_for(0, results)
    with WorkerPool(threads) as pool:
        for job in range(3000):
            block[NEXT], block[TASKS] = 0, job % 65
            results[:] = 0
            pool.run(claim.address, block.ctypes.data)
            assert results.sum() == (job % 65) * (job % 65 + 1) // 2
            assert (results[: job % 65] == np.arange(1, job % 65 + 1)).all()


@pytest.mark.parametrize("threads", THREADS)
def test_a_late_worker_never_touches_the_args_of_a_job_that_is_over(threads: int) -> None:
    results, canary = np.zeros(8, np.int64), np.zeros(8, np.int64)
    block = block_for(8, results)
    with WorkerPool(threads) as pool:
        for job in range(1, 3001):
            block[[NEXT, TASKS, RESULTS]] = 0, 8, results.ctypes.data
            pool.run(claim.address, block.ctypes.data)
            block[[NEXT, TASKS, RESULTS]] = 0, 8, canary.ctypes.data  # what a late worker would take for work
            assert block[NEXT] == 0
            assert not canary.any()
            assert (results == job * np.arange(1, 9)).all()


@pytest.mark.parametrize("now", ["as seen", "one more has joined", "closed", "closed and reopened"])
def test_a_worker_joins_only_the_very_state_that_it_saw(now: str) -> None:
    """The window between look and join is nanoseconds wide, so threads alone would not show it."""
    seen = 7 << _NUMBER | _OPEN | 1
    state = {"as seen": seen, "one more has joined": seen + 1, "closed": seen - _OPEN - 1}.get(
        now, seen + (1 << _NUMBER)
    )
    word = np.array([state])
    assert _join(word.ctypes.data, seen) == (now == "as seen")
    assert word[0] == state + (now == "as seen")


@pytest.mark.parametrize("threads", THREADS)
def test_all_threads_join_a_job_that_lasts_also_after_long_naps(threads: int) -> None:
    block = np.zeros(5, np.int64)
    block[WANTED] = threads
    with WorkerPool(threads) as pool:
        for pause_s in (0, 0.1, 0):  # the workers spin, nap for long, and spin again
            time.sleep(pause_s)
            block[SEATS] = 0
            pool.run(meet.address, block.ctypes.data)
            assert block[SEATS] == threads


@pytest.mark.parametrize("threads", THREADS)
def test_no_thread_is_left_after_exit(threads: int) -> None:
    with WorkerPool(threads):
        assert len(compute_threads()) == threads - 1
    assert compute_threads() == []


def test_no_thread_is_left_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), WorkerPool(3):
        raise ZeroDivisionError
    assert compute_threads() == []


def test_no_thread_is_left_when_one_cannot_start(refuse_thread: Callable[[str], None]) -> None:
    refuse_thread("-3")
    with pytest.raises(MachineError, match=r"thread 3 of 8 .* can't start .* fewer threads"), WorkerPool(8):
        pass
    assert compute_threads() == []


def test_a_pool_runs_jobs_only_between_its_one_enter_and_its_exit() -> None:
    pool = WorkerPool(2)
    with pytest.raises(UsageError, match="between enter and exit"):
        pool.run(claim.address, 0)
    with pool, pytest.raises(UsageError, match="entered once"):
        pool.__enter__()
    with pytest.raises(UsageError, match="entered once"):
        pool.__enter__()
    with pytest.raises(UsageError, match="between enter and exit"):
        pool.run(claim.address, 0)
    assert compute_threads() == []


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_pool_has_at_least_the_callers_thread(threads: int) -> None:
    with pytest.raises(UsageError, match=f"not {threads}"):
        WorkerPool(threads)


def run_until_refused(pool: WorkerPool, args: int, has_run: threading.Event, refusals: list[UsageError]) -> None:
    block = words_of(args)
    try:
        while True:
            block[NEXT] = 0
            pool.run(claim.address, args)
            has_run.set()
    except UsageError as error:
        refusals.append(error)


def words_of(address: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int64 * 5).from_address(address))


@pytest.mark.parametrize("threads", THREADS)
def test_exit_from_another_thread_comes_between_two_jobs_and_ends_the_runs(threads: int) -> None:
    for _ in range(150):
        results = np.zeros(8, np.int64)
        block = block_for(8, results)
        has_run, refusals = threading.Event(), list[UsageError]()
        with WorkerPool(threads) as pool:
            runner = threading.Thread(target=run_until_refused, args=(pool, block.ctypes.data, has_run, refusals))
            runner.start()
            assert has_run.wait(60)
        assert compute_threads() == []
        runner.join(60)
        assert not runner.is_alive()
        assert ["between enter and exit" in str(refusal) for refusal in refusals] == [True]
        assert (results == results[0] * np.arange(1, 9)).all()
        assert results[0] > 0


@pytest.mark.parametrize("threads", THREADS)
def test_exit_waits_until_no_thread_is_in_the_job(threads: int) -> None:
    block = np.zeros(5, np.int64)
    seats_left_at_exit: list[int] = []
    pool = WorkerPool(threads)
    pool.__enter__()

    def leave() -> None:
        pool.__exit__(None, None, None)
        seats_left_at_exit.append(int(block[SEATS] - block[RESULTS]))

    runner = threading.Thread(target=pool.run, args=(stay.address, block.ctypes.data))
    runner.start()
    while not block[SEATS]:
        time.sleep(0.001)
    leaver = threading.Thread(target=leave)
    leaver.start()
    leaver.join(0.1)  # a pool that does not wait is out by then
    block[WANTED] = 1
    leaver.join(60)
    runner.join(60)
    assert seats_left_at_exit == [0]
    assert block[SEATS] > 0


def test_without_compilation_the_import_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    spec = importlib.util.find_spec("expertstream_engine.kernels.native")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(MachineError, match=r"NUMBA_DISABLE_JIT is set.*unset it"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
