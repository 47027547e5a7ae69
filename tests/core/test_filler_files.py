"""Promises of reading one file: whole, in place, in the mode that is said, with errors that name the place."""

import ctypes
import errno
import hashlib
import mmap
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import LogCapture

from expertstream.config import IoMode
from expertstream.errors import CheckpointError, MachineError, ReadFailed
from expertstream.filler import OpenFile, PartRead, RawFile, open_raw_file
from expertstream.filler.files import SourceFile

pytestmark = pytest.mark.timeout(60)

BLOCK = 4096
PATH = Path("shard-00002-of-00003.gguf")
CONTENT = hashlib.shake_128(b"content").digest(40 * BLOCK + 1234)
CANARY = 0xA5


@define(eq=False)
class FakeFile:
    """Bytes in memory behind the rules of a strict device; `answer` sees each read and may do otherwise."""

    content: bytes
    direct: bool
    answer: Callable[["FakeFile", memoryview, int], int] | None = None
    reads: list[tuple[int, int]] = field(factory=list)
    is_closed: bool = False

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        assert not self.is_closed
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if self.direct and (address % BLOCK or offset % BLOCK or len(buffer) % BLOCK):
            raise OSError(errno.EINVAL, "misaligned")
        self.reads.append((offset, len(buffer)))
        return self.copy(buffer, offset) if self.answer is None else self.answer(self, buffer, offset)

    def copy(self, buffer: memoryview, offset: int, at_most: int | None = None) -> int:
        piece = self.content[offset : offset + len(buffer)][:at_most]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Layer:
    """Opens fake files and remembers them; reads of the probe are passed over by `answer`."""

    def __init__(
        self, answer: Callable[[FakeFile, memoryview, int], int] | None = None, refuse_direct_open: int = 0
    ) -> None:
        self.answer = answer
        self.refuse_direct_open = refuse_direct_open
        self.opened: list[FakeFile] = []
        self.probing = True

    def __call__(self, path: Path, direct: bool) -> RawFile:
        if direct and self.refuse_direct_open:
            raise OSError(self.refuse_direct_open, os.strerror(self.refuse_direct_open), str(path))
        self.opened.append(FakeFile(CONTENT, direct, self._answer))
        return self.opened[-1]

    def _answer(self, raw: FakeFile, buffer: memoryview, offset: int) -> int:
        if self.probing or self.answer is None:
            return raw.copy(buffer, offset)
        return self.answer(raw, buffer, offset)

    def source(self, io_mode: IoMode = "auto") -> SourceFile:
        source = SourceFile(PATH, io_mode, self)
        self.probing = False
        return source


@pytest.fixture
def log() -> Iterator[list[dict[str, object]]]:
    capture = LogCapture()
    structlog.configure(processors=[capture])
    yield capture.entries
    structlog.reset_defaults()


def part_read(offset: int, length: int, room_offset: int = BLOCK) -> PartRead:
    shift = offset % BLOCK
    room_bytes = -(-(shift + length) // BLOCK) * BLOCK
    return PartRead(0, offset, length, room_offset + shift, room_offset, room_bytes)


def read_part(source: SourceFile, part: PartRead) -> bytes:
    """Reads into a fresh slot of canaries, and sees that nothing outside the room was written."""
    with mmap.mmap(-1, part.room_offset + part.room_bytes + BLOCK) as memory:
        memory[:] = bytes([CANARY]) * len(memory)
        with memoryview(memory) as view:
            source.read(part, view, lambda path, offset, length: None)
        end = part.room_offset + part.room_bytes
        assert set(memory[: part.room_offset]) | set(memory[end:]) <= {CANARY}
        return memory[part.position : part.position + part.length]


def errno_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("io_mode", ["direct", "buffered"])
@given(start=st.integers(0, len(CONTENT) - 1), length=st.integers(1, 5 * BLOCK), room=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_byte_lands_in_place_and_none_outside_the_room(
    io_mode: IoMode, start: int, length: int, room: int
) -> None:
    length = min(length, len(CONTENT) - start)
    source = Layer().source(io_mode)
    assert source.reads_direct == (io_mode == "direct")
    assert read_part(source, part_read(start, length, room * BLOCK)) == CONTENT[start : start + length]


def test_a_direct_read_asks_for_the_blocks_of_its_part_and_no_more() -> None:
    layer = Layer()
    source = layer.source("direct")
    del layer.opened[0].reads[:]
    read_part(source, part_read(3 * BLOCK + 32, 2 * BLOCK))
    assert layer.opened[0].reads == [(3 * BLOCK, 3 * BLOCK)]


def test_a_buffered_read_asks_for_exactly_the_part() -> None:
    layer = Layer()
    source = layer.source("buffered")
    assert [raw.direct for raw in layer.opened] == [False]
    read_part(source, part_read(3 * BLOCK + 32, 2 * BLOCK))
    assert layer.opened[0].reads == [(3 * BLOCK + 32, 2 * BLOCK)]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_files_of_any_size_are_probed_and_read(length: int, tmp_path: Path) -> None:
    content = CONTENT[:length]
    path = tmp_path / "small"
    path.write_bytes(content)
    source = SourceFile(path, "auto")
    assert read_part(source, part_read(0, length)) == content
    source.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_refused_direct_open_is_warned_of_once_and_read_buffered(number: int, log: list[dict[str, object]]) -> None:
    source = Layer(refuse_direct_open=number).source()
    for _ in range(3):
        assert read_part(source, part_read(100, 9000)) == CONTENT[100:9100]
    assert not source.reads_direct
    assert [(entry["log_level"], entry["path"]) for entry in log] == [("warning", str(PATH))]
    assert errno.errorcode[number] in str(log[0]["reason"])


@pytest.mark.parametrize("refused_offset", [0, BLOCK])
def test_a_refused_probe_is_warned_of_once_and_read_buffered(refused_offset: int, log: list[dict[str, object]]) -> None:
    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        if raw.direct and offset == refused_offset:
            raise errno_of(errno.EINVAL)
        return raw.copy(buffer, offset)

    layer = Layer(answer)
    layer.probing = False
    source = layer.source()
    assert read_part(source, part_read(100, 9000)) == CONTENT[100:9100]
    assert not source.reads_direct
    assert len(log) == 1
    assert layer.opened[0].is_closed
    source.close()
    assert all(raw.is_closed for raw in layer.opened)


def test_direct_only_refuses_a_file_that_cannot_be_opened_or_probed_directly(log: list[dict[str, object]]) -> None:
    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        raise errno_of(errno.EINVAL)

    probe_refused = Layer(answer)
    probe_refused.probing = False
    for layer in (Layer(refuse_direct_open=errno.EINVAL), probe_refused):
        with pytest.raises(MachineError, match=rf"{PATH}.*\(EINVAL\)"):
            layer.source("direct")
        assert all(raw.is_closed for raw in layer.opened)
    assert not log


def test_a_late_refusal_turns_the_file_to_buffered_reads_once(log: list[dict[str, object]]) -> None:
    count = iter(range(1, 10_000))

    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        if raw.direct and next(count) >= 50:
            raise errno_of(errno.EINVAL)
        return raw.copy(buffer, offset)

    source = Layer(answer).source()
    for number in range(60):
        start = number * 2000
        assert read_part(source, part_read(start, 7777)) == CONTENT[start : start + 7777]
        assert source.reads_direct == (number < 49)
    assert len(log) == 1


def test_threads_refused_at_once_give_one_warning(log: list[dict[str, object]]) -> None:
    together = threading.Barrier(8)

    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        if raw.direct:
            together.wait()
            raise errno_of(errno.EINVAL)
        return raw.copy(buffer, offset)

    source = Layer(answer).source()
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda start: read_part(source, part_read(start, 5000)), range(0, 8000, 1000)))
    assert pieces == [CONTENT[start : start + 5000] for start in range(0, 8000, 1000)]
    assert len(log) == 1


def test_direct_only_fails_at_a_late_refusal() -> None:
    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        raise errno_of(errno.EINVAL)

    with pytest.raises(ReadFailed, match=rf"reading {PATH} at offset 100, 9000 bytes wanted, 0 read: .*\(EINVAL\)"):
        read_part(Layer(answer).source("direct"), part_read(100, 9000))


@pytest.mark.parametrize("io_mode", ["direct", "buffered"])
@pytest.mark.parametrize("missing_bytes", [4096, 512, 5000])
def test_short_reads_are_continued_until_the_part_is_whole(io_mode: IoMode, missing_bytes: int) -> None:
    count = iter(range(10_000))

    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        is_short = next(count) % 2 == 0 and len(buffer) > missing_bytes
        return raw.copy(buffer, offset, len(buffer) - missing_bytes if is_short else None)

    source = Layer(answer).source(io_mode)
    assert read_part(source, part_read(777, 20 * BLOCK)) == CONTENT[777 : 777 + 20 * BLOCK]
    assert source.reads_direct == (io_mode == "direct")


def test_one_byte_at_a_time_is_enough_for_a_buffered_read() -> None:
    source = Layer(lambda raw, buffer, offset: raw.copy(buffer, offset, 1)).source("buffered")
    assert read_part(source, part_read(777, 3000)) == CONTENT[777:3777]


def test_one_short_byte_does_not_end_direct_reads() -> None:
    lengths = iter([1])

    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        return raw.copy(buffer, offset, next(lengths, None))

    source = Layer(answer).source("direct")
    assert read_part(source, part_read(777, 9000)) == CONTENT[777:9777]


def test_direct_reads_that_never_advance_are_given_up_for_buffered_ones(log: list[dict[str, object]]) -> None:
    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        return raw.copy(buffer, offset, 1 if raw.direct else None)

    assert read_part(Layer(answer).source(), part_read(777, 9000)) == CONTENT[777:9777]
    assert len(log) == 1
    with pytest.raises(ReadFailed, match="come to a halt at offset 1"):
        read_part(Layer(answer).source("direct"), part_read(777, 9000))


@pytest.mark.parametrize(("io_mode", "got_bytes"), [("direct", 2 * BLOCK - 777), ("buffered", 2 * BLOCK)])
def test_nothing_in_the_middle_is_an_error_with_wanted_and_got(io_mode: IoMode, got_bytes: int) -> None:
    answers = iter([2 * BLOCK, 0])

    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        return raw.copy(buffer, offset, next(answers))

    with pytest.raises(ReadFailed, match=f"at offset 777, 20000 bytes wanted, {got_bytes} read: the file ends there"):
        read_part(Layer(answer).source(io_mode), part_read(777, 20_000))


@pytest.mark.parametrize("io_mode", ["auto", "buffered"])
def test_a_file_cut_after_the_open_is_an_error(io_mode: IoMode) -> None:
    start = len(CONTENT) - 1000
    with pytest.raises(ReadFailed, match=f"at offset {start}, 5000 bytes wanted, 1000 read: the file ends there"):
        read_part(Layer().source(io_mode), part_read(start, 5000))


@pytest.mark.parametrize("io_mode", ["direct", "buffered"])
def test_an_interrupted_read_is_repeated(io_mode: IoMode) -> None:
    interrupts = iter([True, True])

    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        if next(interrupts, False):
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return raw.copy(buffer, offset)

    layer = Layer(answer)
    layer.probing = False
    source = layer.source(io_mode)
    interrupts = iter([True, True])
    assert read_part(source, part_read(777, 9000)) == CONTENT[777:9777]


@pytest.mark.parametrize("io_mode", ["auto", "direct", "buffered"])
def test_a_storage_error_names_the_place_and_does_not_blame_the_file(io_mode: IoMode) -> None:
    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        if offset >= 8 * BLOCK:
            raise errno_of(errno.EIO)
        return raw.copy(buffer, offset, 8 * BLOCK - offset)

    source = Layer(answer).source(io_mode)
    with pytest.raises(ReadFailed) as failure:
        read_part(source, part_read(777, 20 * BLOCK))
    assert str(failure.value) == (
        f"reading {PATH} at offset 777, {20 * BLOCK} bytes wanted, {8 * BLOCK - 777} read: Input/output error (EIO): "
        "the storage failed; this does not mean that the file is damaged"
    )
    assert source.reads_direct == (io_mode != "buffered")


def test_a_storage_error_while_probing_is_no_reason_to_fall_back() -> None:
    def answer(raw: FakeFile, buffer: memoryview, offset: int) -> int:
        raise errno_of(errno.EIO)

    layer = Layer(answer)
    layer.probing = False
    with pytest.raises(ReadFailed, match=rf"{PATH} at offset 0.*\(EIO\)"):
        layer.source()
    assert [raw.is_closed for raw in layer.opened] == [True]


@pytest.mark.parametrize("io_mode", ["auto", "direct"])
def test_a_probe_that_hangs_is_given_up_and_its_file_closed_by_itself_alone(io_mode: IoMode) -> None:
    ends, closed = threading.Event(), threading.Event()

    class Hung(FakeFile):
        def pread_into(self, buffer: memoryview, offset: int) -> int:
            assert ends.wait(30)
            return self.copy(buffer, offset)  # the memory is still there

        def close(self) -> None:
            super().close()
            closed.set()

    opened: list[Hung] = []

    def open_file(path: Path, direct: bool) -> RawFile:
        opened.append(Hung(CONTENT, direct))
        return opened[-1]

    wanted = rf"direct reads of {PATH}: the storage has not answered for 0\.1 s, .* raise the read timeout"
    with pytest.raises(ReadFailed, match=wanted):
        SourceFile(PATH, io_mode, open_file, read_timeout_s=0.1)
    assert [raw.is_closed for raw in opened] == [False]  # a descriptor under a read must not become another file's
    ends.set()
    assert closed.wait(30)


def test_a_missing_file_and_a_lack_of_descriptors_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing.gguf.*\(ENOENT\)"):
        SourceFile(tmp_path / "missing.gguf", "auto")

    def no_descriptor(path: Path, direct: bool) -> RawFile:
        raise errno_of(errno.EMFILE)

    with pytest.raises(MachineError, match=r"\(EMFILE\); raise the limit of open files"):
        SourceFile(PATH, "auto", no_descriptor)


@pytest.mark.parametrize("io_mode", ["direct", "buffered"])
def test_no_system_call_asks_for_more_than_a_gibibyte(io_mode: IoMode) -> None:
    length, start = 3 << 30, (4 << 30) + 4096 + 32

    class Huge:
        """Touches the first and last byte of each read, so that most of the slot stays unallocated."""

        def __init__(self) -> None:
            self.reads: list[tuple[int, int]] = []

        def pread_into(self, buffer: memoryview, offset: int) -> int:
            self.reads.append((offset, len(buffer)))
            buffer[0], buffer[-1] = (offset >> 12) % 251, (offset + len(buffer)) // 32 % 251
            return len(buffer)

        def close(self) -> None:
            pass

    huge = Huge()
    source = SourceFile(PATH, io_mode, lambda path, direct: huge)
    del huge.reads[:]
    part = part_read(start, length, 0)
    with mmap.mmap(-1, part.room_bytes) as memory, memoryview(memory) as view:
        source.read(part, view, lambda path, offset, length: None)
        for offset, size in huge.reads:
            at = part.position + offset - start
            assert memory[at] == (offset >> 12) % 251
            assert memory[at + size - 1] == (offset + size) // 32 % 251
    assert max(size for _, size in huge.reads) <= 1 << 30
    ends = [offset + size for offset, size in huge.reads]
    assert [offset for offset, _ in huge.reads][1:] == ends[:-1]
    assert huge.reads[0][0] <= start
    assert ends[-1] >= start + length


def test_offsets_beyond_four_gibibytes_reach_their_bytes(tmp_path: Path) -> None:
    path, start = tmp_path / "sparse", (5 << 30) + 96
    with path.open("wb") as file:
        file.seek(start)
        file.write(CONTENT)
    source = SourceFile(path, "auto")
    assert read_part(source, part_read(start + 5000, 33_333)) == CONTENT[5000 : 5000 + 33_333]
    source.close()


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that has no direct reads at all."""
    yield from _mounted(tmp_path, ["mount", "-t", "ramfs", "none", str(tmp_path)])


@pytest.fixture
def large_sectors(tmp_path: Path) -> Iterator[Path]:
    """A file system on a disk with sectors of 4096 bytes, where any misaligned direct read is refused."""
    image, folder = tmp_path / "disk", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    attach = ["losetup", "--find", "--show", "--sector-size", "4096", str(image)]
    device = _run(attach).strip()
    try:
        _run(["mkfs.ext4", "-q", "-b", "4096", device])
        yield from _mounted(folder, ["mount", device, str(folder)])
    finally:
        _run(["losetup", "--detach", device])


def _mounted(folder: Path, mount: list[str]) -> Iterator[Path]:
    _run(mount)
    try:
        yield folder
    finally:
        _run(["umount", str(folder)])


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{' '.join(command)}: {error.stderr.strip()}")


def test_a_real_file_system_without_direct_reads_is_read_buffered(ramfs: Path, log: list[dict[str, object]]) -> None:
    path = ramfs / "shard"
    path.write_bytes(CONTENT)
    source = SourceFile(path, "auto")
    assert read_part(source, part_read(777, 20_000)) == CONTENT[777:20_777]
    source.close()
    assert not source.reads_direct
    assert len(log) == 1
    with pytest.raises(MachineError, match=str(path)):
        SourceFile(path, "direct")


def test_a_real_disk_with_large_sectors_is_read_directly(large_sectors: Path) -> None:
    path = large_sectors / "shard"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:  # the rule is real here: half a block is refused
        with mmap.mmap(-1, BLOCK) as page, memoryview(page) as view, pytest.raises(OSError, match="Invalid argument"):
            os.preadv(descriptor, [view[:512]], 512)
    finally:
        os.close(descriptor)
    source = SourceFile(path, "direct")
    for start, length in ((0, 1), (777, 20_000), (len(CONTENT) - 1000, 1000)):
        assert read_part(source, part_read(start, length)) == CONTENT[start : start + length]
    source.close()


def test_the_real_layer_names_itself_unable_where_the_system_has_no_bypass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opener: OpenFile = open_raw_file
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.delattr("fcntl.F_NOCACHE", raising=False)
    with pytest.raises(OSError, match="no reads past the page cache") as refusal:
        opener(tmp_path / "any", True)
    assert refusal.value.errno == errno.ENOTSUP


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"position": BLOCK}, "differ modulo 4096"),
        ({"room_offset": 100}, "not aligned"),
        ({"room_bytes": 2 * BLOCK - 1}, "not aligned"),
        ({"room_bytes": BLOCK}, "do not lie in the room"),
        ({"room_offset": 2 * BLOCK}, "do not lie in the room"),
        ({"length": 0}, "length"),
        ({"file": -1}, "file"),
    ],
)
def test_a_part_that_could_not_land_in_place_cannot_be_made(changed: dict[str, int], complaint: str) -> None:
    right = {"file": 0, "offset": 777, "length": 6000, "position": BLOCK + 777, "room_offset": BLOCK}
    right["room_bytes"] = 2 * BLOCK
    PartRead(**right)
    with pytest.raises(ValueError, match=complaint):
        PartRead(**{**right, **changed})
