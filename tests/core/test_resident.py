"""Resident tensors hold the files' bytes, are read with several requests at once, and leave no file open."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

import checkpoint_files
from expertstream import CheckpointError, load_resident, open_checkpoint, resident_padding_bytes
from expertstream.config import IoMode
from expertstream.slots import IO_ALIGNMENT_BYTES


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


@pytest.mark.usefixtures("small_pieces")
def test_several_reads_are_under_way_at_once(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, real_preadv = open_checkpoint(written.path), os.preadv
    may_be_first, another_came = threading.Lock(), threading.Event()

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():  # which probes the files
            if may_be_first.acquire(blocking=False):
                assert another_came.wait(30)
            else:
                another_came.set()
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    load_resident(checkpoint)


def test_a_file_that_cannot_be_opened_leaves_no_other_open(written: checkpoint_files.Written) -> None:
    checkpoint = open_checkpoint(written.path)
    checkpoint.files[1].unlink()
    before = sorted(os.listdir("/dev/fd"))
    with pytest.raises(CheckpointError, match=r"No such file"):
        load_resident(checkpoint)
    assert sorted(os.listdir("/dev/fd")) == before
