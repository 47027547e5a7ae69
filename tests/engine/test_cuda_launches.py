"""How kernels are handed to the CUDA driver, which is a stand-in here."""

from __future__ import annotations

import ctypes
import importlib
import struct
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

MODULE = "expertstream_engine.cuda.launching"
SERIALIZED_BY_PROGRAM = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "cupy", MagicMock())
    monkeypatch.setitem(sys.modules, "cupy.cuda", MagicMock())
    real = sys.modules.pop(MODULE, None)
    yield importlib.import_module(MODULE)
    del sys.modules[MODULE]
    if real is not None:
        sys.modules[MODULE] = real


def launched(launching: Any, monkeypatch: pytest.MonkeyPatch, is_early: bool, *arguments: Any) -> Any:
    """What the driver gets, taken from memory as cuda.h lays it out."""
    got = SimpleNamespace()

    def launch(config: Any, function: int, places: Any, extra: None) -> int:
        laid_out = ctypes.string_at(config, 56)
        *got.shape, got.shared_bytes, got.stream, attributes, got.attribute_count = struct.unpack("7I4xQQI4x", laid_out)
        got.attribute = struct.unpack("I4xi", ctypes.string_at(attributes, 12))
        got.function, got.extra = function, extra
        got.arguments = [ctypes.string_at(places[i], 8) for i in range(len(arguments))]
        return 5

    monkeypatch.setattr(launching, "_launch", lambda: launch)
    kernel = launching.Kernel(SimpleNamespace(ptr=1 << 40), is_early)
    kernel((7, 3), 128, arguments, SimpleNamespace(ptr=1 << 41))
    return got


def test_a_launch_has_its_grid_block_and_stream(launching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    got = launched(launching, monkeypatch, False)
    assert got.shape == [7, 3, 1, 128, 1, 1]
    assert (got.function, got.stream, got.shared_bytes, got.extra) == (1 << 40, 1 << 41, 0, None)


def test_every_argument_is_64_bits(launching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    array = SimpleNamespace(data=SimpleNamespace(ptr=(1 << 47) + 2))
    got = launched(launching, monkeypatch, False, 3, -4, np.int64(5), True, 0.1, None, array)
    integers = struct.pack("4q", 3, -4, 5, 1)
    assert b"".join(got.arguments) == integers + struct.pack("d", 0.1) + struct.pack("2Q", 0, (1 << 47) + 2)


@pytest.mark.parametrize("is_early", [False, True])
def test_only_a_device_that_can_is_asked_to_begin_early(
    launching: Any, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    got = launched(launching, monkeypatch, is_early)
    assert got.attribute_count == int(is_early)
    assert got.attribute == (SERIALIZED_BY_PROGRAM, 1)


def test_what_the_driver_answers_is_looked_at(launching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(launching, monkeypatch, False)
    launching.driver.check_status.assert_called_once_with(5)
