"""A file system that refuses direct reads is told of once for each file, though experts and weights are read apart."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from structlog.testing import capture_logs

from expertstream_engine import open_model


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system asks for direct reads in another way")
def test_a_fallback_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def without_direct_reads(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real_open(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", without_direct_reads)
    with capture_logs() as log, open_model(expert_memory="25%") as model:
        assert model.streamer.io_mode == "buffered"
    assert [entry["event"] for entry in log].count("direct_reads_refused") == 1
