"""What a test may take for granted, whoever started this run and however busy the machine is.

What runs in the background, or under nohup, ignores interrupts and hang-ups, and so would every process that a test
starts and then interrupts: signals are put back as a terminal's shell leaves them. Examples may take any time.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any time")

for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


@pytest.fixture
def refuse_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Called with how a thread's name ends: from then on the system has none to give for it, as Python says it then."""
    start = threading.Thread.start

    def refuse(name: str) -> None:
        def start_others(thread: threading.Thread) -> None:
            if thread.name.endswith(name):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_others)

    return refuse
