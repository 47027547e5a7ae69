"""Streams of a device that is the host itself: work on one runs in order, beside the other streams.

Everything launched on a stream has a number, so what is launched can be told from what is over.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition, Lock
from typing import TypeVar

T = TypeVar("T")


class Streams:
    """Streams by number, each with a thread from its first launch to `close`. Any thread may call."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._lock = Lock()

    def launch(self, stream: int, work: Callable[[], T]) -> Future[T]:
        """Run `work` after all that was launched on `stream` before."""
        with self._lock:
            if stream not in self._streams:
                self._streams[stream] = _Stream(stream)
            return self._streams[stream].launch(work)

    def last_launched(self, stream: int) -> int:
        """The number of the last work launched on `stream`, 0 before the first."""
        with self._lock:
            return self._streams[stream].launched if stream in self._streams else 0

    def wait(self, stream: int, number: int) -> None:
        """Block until the work of that number, and all before it, is over."""
        with self._lock:
            found = self._streams.get(stream)
        if found is not None:
            found.wait(number)

    def close(self) -> None:
        """Block until all work is over, then end the threads."""
        with self._lock:
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.thread.shutdown()


class _Stream:
    """`launched` and `over` count; work that failed is over too."""

    def __init__(self, number: int) -> None:
        self.thread = ThreadPoolExecutor(1, f"stream-{number}")
        self.launched = 0
        self._over = 0
        self._progress = Condition()

    def launch(self, work: Callable[[], T]) -> Future[T]:
        self.launched += 1
        return self.thread.submit(self._run, work)

    def wait(self, number: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._over >= number)

    def _run(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            with self._progress:
                self._over += 1
                self._progress.notify_all()
