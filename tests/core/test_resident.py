"""Resident tensors hold the files' bytes, are read with several requests at once, and leave no file open."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

import checkpoint_files
from expertstream import (
    CheckpointError,
    ConfigError,
    ReadFailed,
    load_resident,
    open_checkpoint,
    resident_padding_bytes,
)
from expertstream.config import IoMode
from expertstream.filler import RawFile, open_raw_file
from expertstream.slots import IO_ALIGNMENT_BYTES
from memory_pages import pages_in_memory


@pytest.fixture
def written(tmp_path: Path) -> checkpoint_files.Written:
    return checkpoint_files.write_checkpoint(tmp_path / "telling.gguf", shards=2)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertstream.resident._PIECE_BYTES", IO_ALIGNMENT_BYTES)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("io_mode", ["auto", "buffered"])
def test_every_byte_equals_the_files_and_progress_only_grows(
    written: checkpoint_files.Written, io_mode: IoMode
) -> None:
    checkpoint = open_checkpoint(written.path)
    heard: list[tuple[int, int]] = []
    tensors = load_resident(checkpoint, io_mode, lambda done, total: heard.append((done, total)))
    files = [path.read_bytes() for path in checkpoint.files]
    assert {name: data.tobytes() for name, data in tensors.items()} == {
        name: files[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
        for name, tensor in checkpoint.tensors.items()
    }
    assert not any(data.flags.writeable for data in tensors.values())
    assert heard == sorted(heard)
    assert heard[-1] == (checkpoint.resident_bytes, checkpoint.resident_bytes)
    assert len(heard) > 2
    assert resident_padding_bytes(checkpoint) >= 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system takes no part of a mapping back")
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_tensor_that_is_released_takes_its_pages_along_but_for_those_of_others(
    written: checkpoint_files.Written, seed: int | None
) -> None:
    """In the order of the file, and in any other."""
    checkpoint = open_checkpoint(written.path)
    tensors = load_resident(checkpoint)
    files = [path.read_bytes() for path in checkpoint.files]
    spans = {name: (data.ctypes.data, data.ctypes.data + data.nbytes) for name, data in tensors.items()}
    begin = min(start for start, _ in spans.values()) // mmap.PAGESIZE * mmap.PAGESIZE
    end = max(stop for _, stop in spans.values())
    order = list(tensors)
    if seed is not None:
        random.Random(seed).shuffle(order)
    assert pages_in_memory(begin, end - begin) >= pages_of(spans.values())
    for name in order:
        tensors.release(name)
        del spans[name]
        assert name not in tensors
        assert pages_in_memory(begin, end - begin) <= pages_of(spans.values())
        for left, data in tensors.items():
            tensor = checkpoint.tensors[left]
            assert data.tobytes() == files[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
    assert not tensors
    with pytest.raises(KeyError):
        tensors.release(order[0])


def pages_of(spans: Iterable[tuple[int, int]]) -> set[int]:
    """Addresses of the pages that any of these reaches into."""
    return {
        page * mmap.PAGESIZE for start, end in spans for page in range(start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))
    }


@pytest.mark.usefixtures("small_pieces")
def test_several_reads_are_under_way_at_once(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, real_preadv = open_checkpoint(written.path), os.preadv
    may_be_first, another_came = threading.Lock(), threading.Event()

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if is_filler_thread():  # others probe the files
            if may_be_first.acquire(blocking=False):
                assert another_came.wait(30)
            else:
                another_came.set()
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    load_resident(checkpoint)


def is_filler_thread() -> bool:
    return threading.current_thread().name.startswith("filler-")


class Opener:
    """Opens the real files; `before_read` is called before each read that is of a tensor, and not of a probe."""

    def __init__(self, before_read: Callable[[], object]) -> None:
        self.before_read = before_read

    def __call__(self, path: Path, direct: bool) -> RawFile:
        return OpenedFile(open_raw_file(path, direct), self.before_read)


class OpenedFile:
    def __init__(self, raw: RawFile, before_read: Callable[[], object]) -> None:
        self.raw = raw
        self.before_read = before_read

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        if is_filler_thread():
            self.before_read()
        return self.raw.pread_into(buffer, offset)

    def close(self) -> None:
        self.raw.close()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("asked", "most"), [(1, 1), (3, 3), (64, 4)])
def test_no_more_threads_read_than_were_asked_for_or_are_needed(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch, asked: int, most: int
) -> None:
    started: list[str] = []
    real_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread.name)
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    load_resident(open_checkpoint(written.path), thread_count=asked)
    assert sorted(name for name in started if name.startswith("filler-")) == [f"filler-{n}" for n in range(most)]


def test_no_thread_is_refused(written: checkpoint_files.Written) -> None:
    with pytest.raises(ConfigError, match="0 filler threads were asked for"):
        load_resident(open_checkpoint(written.path), thread_count=0)


def test_a_read_that_hangs_is_given_up_after_the_time_that_was_asked_for(written: checkpoint_files.Written) -> None:
    ends = threading.Event()
    with pytest.raises(ReadFailed, match=rf"reading {written.path.parent}.* has not answered for \d+\.\d s"):
        load_resident(open_checkpoint(written.path), read_timeout_s=0.2, open_file=Opener(lambda: ends.wait(30)))
    ends.set()


def test_a_file_that_is_written_to_while_it_is_read_is_refused(written: checkpoint_files.Written) -> None:
    checkpoint = open_checkpoint(written.path)

    def write() -> None:
        with checkpoint.files[0].open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")

    with pytest.raises(
        CheckpointError, match=rf"{checkpoint.files[0]}: it was written to since .* open the model again"
    ):
        load_resident(checkpoint, open_file=Opener(write))


def test_a_file_that_cannot_be_opened_leaves_no_other_open(written: checkpoint_files.Written) -> None:
    checkpoint = open_checkpoint(written.path)
    checkpoint.files[1].unlink()
    before = sorted(os.listdir("/dev/fd"))
    with pytest.raises(CheckpointError, match=r"No such file"):
        load_resident(checkpoint)
    assert sorted(os.listdir("/dev/fd")) == before
