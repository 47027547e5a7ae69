"""A limit on calls that may never return: they run in a thread that is left behind when its time is over."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from expertstream.log import get_log

T = TypeVar("T")


class Unfinished(Exception):
    """A call has not returned; the message says where it stands. Its thread is still there."""


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, from a thread of its own. Raises Unfinished after `limit_s` seconds.

    Where the system has no thread to give, the call is made here, without a limit, and the log says so.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is raised again below
            outcome.set_exception(error)

    thread = Thread(target=run, name="limited call", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # what Python says then
        get_log().warning("no_time_limit", seconds=limit_s, reason=f"no thread could be started: {error}")
        return call()
    thread.join(limit_s)
    if not outcome.done():
        frame = sys._current_frames().get(thread.ident or 0)
        stands_at = "".join(traceback.format_stack(frame)) if frame is not None else "it ended just now"
        raise Unfinished(f"no end after {limit_s:g} s; it stands here:\n{stands_at}")
    return outcome.result()
