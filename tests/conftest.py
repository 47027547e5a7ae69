"""What a test may take for granted, whoever started this run and however busy the machine is.

What runs in the background, or under nohup, ignores interrupts and hang-ups, and so would every process that a test
starts and then interrupts: signals are put back as a terminal's shell leaves them. Examples may take any time.
"""

from __future__ import annotations

import signal

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
