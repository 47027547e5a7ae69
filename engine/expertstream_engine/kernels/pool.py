"""Threads that run compiled jobs together, each job costing a few microseconds to start.

A job is `void job(int64 args)`, compiled and free of the GIL. Every thread that takes part runs it once; the
job shares out its own work by an atomic counter in `args`. The pool knows nothing of what a job does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from expertstream.errors import MachineError, UsageError
from expertstream_engine.kernels.native import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    call_job,
    cfunc,
    njit,
    pause,
    sched_yield,
    usleep,
    words_at,
)

MOST_THREADS = 1024


class WorkerPool:
    """`threads` threads, the caller's among them, between enter and exit.

    Idle workers spin for about 0.1 ms, then offer their cores to others again and again for 0.3 ms, and then nap, so
    that files are read meanwhile. Runs and exit may be called from any thread, and wait for each other. A pool is
    entered once; raises UsageError otherwise.
    """

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= MOST_THREADS:
            raise UsageError(f"a pool has 1 to {MOST_THREADS} threads, not {threads}")
        self.threads = threads
        self._control = np.zeros(_CONTROL_WORDS, np.int64)
        self._control_address = int(self._control.ctypes.data)
        self._workers: list[threading.Thread] = []
        self._entered = False
        self._open = False
        # Held while a job runs, so that a stop neither crosses one nor frees what it uses. It lets its own thread in
        # again: a signal's handler may exit the pool where it has interrupted `run`, outside of the job.
        self._running = threading.RLock()

    def __enter__(self) -> Self:
        """Start the threads. Raises MachineError where one cannot be started; none is left then."""
        if self._entered:
            raise UsageError("a pool is entered once")
        self._entered = True
        _compile(self._control)
        try:
            for number in range(1, self.threads):
                self._start_worker(number)
        except BaseException:
            self._stop()
            raise
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads, after the job under way."""
        with self._running:
            self._open = False
            self._stop()

    def run(self, job: int, args: int) -> None:
        """Run the job at address `job` on all threads that are awake; returns when no thread is in it any more.

        The caller's thread always takes part, so a job must end with one thread. Raises UsageError when not open.
        """
        with self._running:
            if not self._open:
                raise UsageError("a pool runs jobs between enter and exit")
            _run(self._control_address, job, args)

    def _start_worker(self, number: int) -> None:
        worker = threading.Thread(
            target=_work, args=(self._control,), name=f"expertstream-compute-{number}", daemon=True
        )
        self._workers.append(worker)
        try:
            worker.start()
        except RuntimeError as error:  # what Python says where the system has no thread to give
            raise MachineError(
                f"compute thread {number} of {self.threads} could not be started: {error};"
                " compute with fewer threads, or raise the limit on processes (ulimit -u) or on address space (ulimit"
                " -v), or the container's"
            ) from error

    def _stop(self) -> None:
        _tell_to_stop(self._control_address)
        for worker in self._workers:
            if worker.ident is not None:  # the last one may have failed to start
                worker.join()
        self._workers.clear()


@cache
def job_address(job: Callable[[int], None]) -> int:
    """The address of `job`, a plain function of numba's Python, compiled on first use and kept for the process."""
    compiled = cfunc("void(int64)", nopython=True, cache=True, error_model="numpy")(job)
    _KEPT.append(compiled)
    return int(compiled.address)


_KEPT: list[Any] = []

# The control block. The state is one word, so that joining is one compare-and-exchange: a worker that looked before
# the job was closed, or before the next one was opened, finds another word and never touches the args of a job
# that is over.
#     bits 0 to 15   how many workers are in the job
#     bit 16         open: workers may join
#     bit 17         stop: workers leave for good
#     bits 18 up     the job's number, so that a worker joins each job once
_STATE = 8  # in words; alone on its cache line, because every idle worker polls it
_JOB = 16
_ARGS = 17
_CONTROL_WORDS = 32

_JOINED = (1 << 16) - 1
_OPEN = 1 << 16
_STOP = 1 << 17
_NUMBER = 18

_SPINS = 3000  # 50 to 150 us of `pause`
_YIELDS = 1000  # some 0.3 ms, which bridges what Python does between two jobs of a layer
_NAP_US = 50
_NAPS = 200  # some 20 ms of short naps before long ones
_LONG_NAP_US = 1000


def _compile(control: NDArray[np.int64]) -> None:
    """Compile here and now what the threads run, and leave the control block as it was."""
    address = int(control.ctypes.data)
    _tell_to_stop(address)
    _work(control)  # which leaves at once
    control[:] = 0
    _run(address, job_address(_nothing), 0)


def _nothing(args: int) -> None:
    pass


@njit(nogil=True, cache=True, error_model="numpy")
def _run(control: int, job: int, args: int) -> None:
    state = control + 8 * _STATE
    block = words_at(control)
    block[_JOB] = job
    block[_ARGS] = args
    number = (atomic_load(state) >> _NUMBER) + 1
    atomic_store(state, (number << _NUMBER) | _OPEN)
    call_job(job, args)
    atomic_add(state, -_OPEN)
    spins = 0
    while atomic_load(state) & _JOINED:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            sched_yield()  # the worker that is still in the job may be waiting for this core


@njit(nogil=True, cache=True, error_model="numpy")
def _work(control: Any) -> None:
    address = control.ctypes.data  # the array, not its address, so that it outlives this thread
    state = address + 8 * _STATE
    block = words_at(address)
    done = 0
    idle = 0
    while True:
        seen = atomic_load(state)
        if seen & _STOP:
            return
        if seen & _OPEN and seen >> _NUMBER != done:
            if _join(state, seen):
                done = seen >> _NUMBER
                call_job(block[_JOB], block[_ARGS])
                atomic_add(state, -1)
            idle = 0
            continue
        idle += 1
        if idle < _SPINS:
            pause()
        elif idle < _SPINS + _YIELDS:
            sched_yield()
        elif idle < _SPINS + _YIELDS + _NAPS:
            usleep(_NAP_US)
        else:
            usleep(_LONG_NAP_US)


@njit(cache=True, error_model="numpy")
def _join(state: int, seen: int) -> bool:
    """Join the job that was `seen` open; False if the state has changed since."""
    joined: bool = atomic_replace(state, seen, seen + 1)
    return joined


@njit(cache=True, error_model="numpy")
def _tell_to_stop(control: int) -> None:
    atomic_store(control + 8 * _STATE, _STOP)
