"""Signals as a terminal's shell leaves them, whoever started this run.

What runs in the background, or under nohup, ignores interrupts and hang-ups, and so would every process that a test
starts and then interrupts.
"""

from __future__ import annotations

import signal

for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)
