"""A damaged or foreign file is refused with its path and the reason, and costs little memory, whatever its bytes."""

import contextlib
import os
import struct
import tempfile
import tracemalloc
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import U8, U64, Tensor, Written, gguf_header, resident, write_checkpoint
from expertstream.checkpoint import open_checkpoint
from expertstream.errors import CheckpointError, ReadFailed, UnsupportedCheckpoint

PLAIN = {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}
LARGEST_ALLOCATION_BYTES = 4 * 2**20
U64_MAX = 2**64 - 1


def refusal(path: Path, error: type[CheckpointError] = CheckpointError) -> str:
    """The message, which names the file and stays short; the refusal itself takes little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert type(caught.value) is error
    assert str(path) in message
    assert len(message) < 1000
    assert peak_bytes < LARGEST_ALLOCATION_BYTES
    return message


def refusal_of_bytes(folder: Path, raw: bytes, error: type[CheckpointError] = CheckpointError) -> str:
    path = folder / "T.gguf"
    path.write_bytes(raw)
    return refusal(path, error)


def refusal_of_tensor(folder: Path, tensor: Tensor, error: type[CheckpointError] = CheckpointError) -> str:
    message = refusal(write_checkpoint(folder / "T.gguf", [PLAIN], more_tensors=[tensor]).path, error)
    assert repr(tensor.name) in message
    return message


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (struct.pack("<Q", 20) + b'{"x":{"dtype":"F32"}', "a safetensors file"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n  <html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git lfs pull"),
        (b"\x1f\x8b" + bytes(60), "a gzip archive"),
        (b"tjgg\x03\x00\x00\x00" + bytes(60), "the format before GGUF"),
        (bytes(64), r"begins with b'\x00\x00"),
        (b"GGU", "begins with b'GGU'"),
    ],
)
def test_another_format_is_named(tmp_path, raw, said):
    message = refusal_of_bytes(tmp_path, raw, UnsupportedCheckpoint)
    assert "not a GGUF file" in message
    assert said in message


def test_an_empty_file_is_named_so(tmp_path):
    assert "the file is empty" in refusal_of_bytes(tmp_path, b"")


def test_a_big_endian_file_is_named_so(tmp_path):
    for version in (2, 3):
        header, _ = gguf_header({"general.architecture": "testmoe"}, version=version, order=">")
        message = refusal_of_bytes(tmp_path, header, UnsupportedCheckpoint)
        assert f"big-endian GGUF file, version {version}" in message
        assert "50331648" not in message


@pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
def test_other_versions_are_refused_by_number(tmp_path, version):
    header, _ = gguf_header({}, version=version)
    assert f"GGUF version {version};" in refusal_of_bytes(tmp_path, header, UnsupportedCheckpoint)


@pytest.mark.parametrize("value", [0, 1, 2, 4, 3, 24, 33, U64(2**63 + 8), "32", 32.0, [32], True], ids=repr)
def test_an_alignment_that_is_no_power_of_two_from_8_is_refused(tmp_path, value):
    written = write_checkpoint(tmp_path / "T.gguf", [PLAIN], metadata={"general.alignment": value})
    assert "general.alignment is " in refusal(written.path)


def test_the_smallest_file_that_divides_by_zero_elsewhere_is_refused(tmp_path):
    header, _ = gguf_header({"general.alignment": 0})
    assert "general.alignment is 0" in refusal_of_bytes(tmp_path, header[:57])


def test_an_alignment_beyond_the_file_is_named_with_the_missing_bytes(tmp_path):
    header, _ = gguf_header({"general.alignment": 2**31}, [resident("x.weight", "F32", 8)])
    message = refusal_of_bytes(tmp_path, header + bytes(4096))
    assert "general.alignment is 2147483648" in message
    assert "shorter than its header says" in message


@pytest.mark.parametrize("name", ["blk.1.ffn_up_exps.weight", "blk.0.attn_q.weight"], ids=["routed", "resident"])
@pytest.mark.parametrize(("number", "said"), [(250, "unknown"), (31, "Q4_0_4_4"), (4, "Q4_2"), (2**32 - 1, "unknown")])
def test_unknown_and_removed_types_are_refused_by_number(tmp_path, name, number, said):
    tensor = Tensor(name, "F32", (64, 4, 8), bytes(8192), type_number=number)
    message = refusal_of_tensor(tmp_path, tensor, UnsupportedCheckpoint)
    assert f"has type {number}" in message
    assert said in message


@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_an_offset_off_the_alignment_is_refused(tmp_path, alignment):
    tensor = Tensor("odd.weight", "F32", (8,), bytes(32), offset=2**20 + alignment // 2)
    written = write_checkpoint(tmp_path / "T.gguf", [PLAIN], alignment=alignment, more_tensors=[tensor])
    message = refusal(written.path)
    assert f"'odd.weight' begins at byte {2**20 + alignment // 2} of the data" in message
    assert f"not a multiple of general.alignment ({alignment})" in message


def test_overlapping_tensors_are_refused_with_both_names(tmp_path):
    tensor = Tensor("over.weight", "F32", (8,), bytes(32), offset=32)
    assert "inside tensor 'token_embd.weight'" in refusal_of_tensor(tmp_path, tensor)


def test_tensors_that_begin_at_one_byte_overlap(tmp_path):
    tensor = Tensor("over.weight", "F32", (8,), bytes(32), offset=0)
    message = refusal(write_checkpoint(tmp_path / "T.gguf", [PLAIN], more_tensors=[tensor]).path)
    assert "'over.weight'" in message
    assert "'token_embd.weight'" in message


@pytest.mark.parametrize("dims", [(0,), (8, 0, 8), (0, 2**63)])
def test_an_empty_tensor_is_refused(tmp_path, dims):
    message = refusal_of_tensor(tmp_path, Tensor("none.weight", "F32", dims, b""))
    assert f"is empty: its dimensions are {dims}" in message


@pytest.mark.parametrize("dims", [(2**63,), (2**32, 2**32), (2**16, 2**16, 2**16, 2**16), (2**64 - 1, 2**64 - 1)])
def test_dimensions_that_overflow_are_refused(tmp_path, dims):
    message = refusal_of_tensor(tmp_path, Tensor("huge.weight", "F32", dims, b""))
    assert f"elements: its dimensions are {dims}" in message


def test_a_range_beyond_the_file_is_refused_with_the_missing_bytes(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", [PLAIN], more_tensors=[Tensor("long.weight", "F32", (2**40,), b"")])
    _, begin, _ = written.places["long.weight"]
    size = written.path.stat().st_size
    assert f"end at byte {begin + 2**42} and the file at {size}, {begin + 2**42 - size} bytes" in refusal(written.path)


def test_an_offset_beyond_the_file_is_refused_with_the_missing_bytes(tmp_path):
    header, offsets = gguf_header({}, [Tensor("far.weight", "F32", (8,), b"", offset=2**64 - 32)])
    assert f"{offsets[0] + 32 - len(header)} bytes too early" in refusal_of_bytes(tmp_path, header)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path):
    tensor = Tensor("odd.weight", "Q4_K", (128, 2), bytes(144))
    assert "rows of 128 elements, not a multiple of Q4_K's block of 256" in refusal_of_tensor(tmp_path, tensor)


def test_more_than_four_dimensions_are_refused(tmp_path):
    assert "has 5 dimensions" in refusal_of_tensor(tmp_path, resident("deep.weight", "F32", 2, 2, 2, 2, 2))


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    tensor = resident("output_norm.weight", "F32", 256)
    assert "is there twice" in refusal_of_tensor(tmp_path, tensor)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    header, _ = gguf_header([("test.key", 1), ("test.key", 1)])
    assert "metadata key 'test.key' is there twice" in refusal_of_bytes(tmp_path, header)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((7, b"\x02"), "a boolean of value 2"),
        ((13, b"\x00"), "value type 13"),
        ((2**31, b"\x00"), "value type 2147483648"),
        ((8, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
        ((8, struct.pack("<Q", U64_MAX)), f"needs {U64_MAX} bytes"),
        ((8, struct.pack("<Q", 2**40)), f"needs {2**40} bytes"),
        ((9, struct.pack("<IQ", 7, 2) + b"\x01\x03"), "a boolean of value 3"),
        ((9, struct.pack("<IQ", 13, 0)), "item type 13"),
        ((9, struct.pack("<IQ", 6, U64_MAX)), f"{U64_MAX} numbers"),
        ((9, struct.pack("<IQ", 6, 2**62)), f"{2**62} numbers"),
        ((9, struct.pack("<IQ", 0, 2**40)), f"{2**40} numbers"),
        ((9, struct.pack("<IQ", 8, 2**61)), f"{2**61} strings"),
        ((9, struct.pack("<IQQ", 8, 1, 2**50)), f"test.key[0] at byte 64 of the header needs {2**50} bytes"),
        ((9, struct.pack("<IQQcQc", 8, 2, 1, b"x", 1, b"\xff")), "test.key[1] is not UTF-8"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_key(tmp_path, value, said):
    header, _ = gguf_header([("test.key", value)])
    message = refusal_of_bytes(tmp_path, header)
    assert "test.key" in message
    assert said in message


def test_arrays_of_arrays_are_refused_as_unsupported(tmp_path):
    header, _ = gguf_header([("test.key", (9, struct.pack("<IQIQ", 9, 1, 4, 0)))])
    assert "test.key is an array of arrays" in refusal_of_bytes(tmp_path, header, UnsupportedCheckpoint)


@pytest.mark.parametrize(("tensors", "keys"), [(2**63, 0), (0, 2**63), (10**6, 0), (0, 10**6), (U64_MAX, U64_MAX)])
def test_counts_beyond_the_file_are_refused(tmp_path, tensors, keys):
    raw = b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + bytes(200)
    assert f"{tensors or keys} {'tensors' if tensors else 'metadata keys'}" in refusal_of_bytes(tmp_path, raw)


def test_a_name_longer_than_the_format_allows_is_refused(tmp_path):
    long = "x" * 2**16
    for header, _ in (gguf_header({long: 1}), gguf_header({}, [resident(long, "F32", 8)])):
        assert "65536 bytes long" in refusal_of_bytes(tmp_path, header)


def test_a_damaged_length_in_a_huge_file_is_not_believed(tmp_path):
    path = tmp_path / "T.gguf"
    for value in ((8, struct.pack("<Q", 2**31)), (9, struct.pack("<IQ", 4, 2**30))):
        header, _ = gguf_header([("test.key", value)])
        path.write_bytes(header)
        os.truncate(path, 2**40)  # sparse
        assert "would make the header larger than 268435456 bytes" in refusal(path)


def test_a_header_cut_at_any_byte_is_refused(tmp_path):
    values = {"test.texts": ["a", "bc"], "test.numbers": [1, 2]}
    written = write_checkpoint(tmp_path / "T.gguf", [PLAIN], metadata=values)
    header_bytes = min(offset for _, offset, _ in written.places.values())
    raw = written.path.read_bytes()[:header_bytes]
    for length in range(len(raw)):
        written.path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match="not a GGUF file" if 0 < length < 4 else "shorter than its header"):
            open_checkpoint(written.path)


@pytest.mark.parametrize("behaviour", ["fails", "ends"])
def test_storage_that_does_not_deliver_is_no_damaged_file(tmp_path, monkeypatch, behaviour):
    class FailingFile:
        """Stands for the file on a disk that fails, or that another program shortens."""

        def __init__(self, path: Path, mode: str) -> None:
            self._stream = path.open(mode)

        def __enter__(self) -> "FailingFile":
            return self

        def __exit__(self, *reason: object) -> None:
            self._stream.close()

        def fileno(self) -> int:
            return self._stream.fileno()

        def read(self, byte_count: int) -> bytes:
            if behaviour == "fails":
                raise OSError(5, "Input/output error")
            return b""

    written = write_checkpoint(tmp_path / "T.gguf")
    monkeypatch.setattr("expertstream.checkpoint.header.FileIO", FailingFile)
    with pytest.raises(ReadFailed, match="Input/output error" if behaviour == "fails" else "shrank") as caught:
        open_checkpoint(written.path)
    assert str(written.path) in str(caught.value)


def test_short_reads_are_completed(tmp_path, monkeypatch):
    class SlowFile(FileIO):
        def read(self, byte_count: int = -1) -> bytes:
            return super().read(min(byte_count, 7))

    written = write_checkpoint(tmp_path / "T.gguf", metadata={"test.texts": ["word"] * 100})
    wanted = open_checkpoint(written.path).identity
    monkeypatch.setattr("expertstream.checkpoint.header.FileIO", SlowFile)
    assert open_checkpoint(written.path).identity == wanted


@pytest.fixture(scope="module")
def small_set():
    """A set of two shards, every kind of value in it, and the bytes of its files."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"test.flag": True, "test.flags": [True, False], "test.texts": ["a", "é", "xyz"], "test.float": 0.5}
        numbers = {"test.u8": U8(1), "test.u64": U64(2**63), "test.numbers": [1, 2, 3], "test.floats": [0.5, 1.5]}
        written = write_checkpoint(
            Path(folder) / "T.gguf",
            [dict.fromkeys(("gate", "up", "down"), "Q8_0"), dict.fromkeys(("gate_up", "down"), "F16")],
            expert_count=2,
            hidden=32,
            width=32,
            shards=2,
            metadata=values | numbers,
        )
        yield written, [path.read_bytes() for path in written.files]


EDGES = [0, 1, 2, 7, 8, 9, 13, 32, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, U64_MAX]
EDITS = st.lists(
    st.tuples(
        st.integers(0, 2**16),
        st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from(EDGES).map(lambda number: struct.pack("<Q", number)),
            st.sampled_from(EDGES).map(lambda number: struct.pack("<I", number % 2**32)),
        ),
    ),
    max_size=6,
)


@given(shard=st.integers(0, 1), edits=EDITS, cut=st.none() | st.integers(0, 2**16))
@settings(max_examples=400, deadline=None)
def test_no_bytes_of_a_header_lead_to_anything_but_a_refusal_or_a_sound_index(small_set, shard, edits, cut):
    written, originals = small_set
    assert_refused_or_sound(written, shard, edited(written, shard, originals[shard], edits, cut))
    written.files[shard].write_bytes(originals[shard])


def edited(written: Written, shard: int, original: bytes, edits: list[tuple[int, bytes]], cut: int | None) -> bytes:
    header_bytes = min(offset for file, offset, _ in written.places.values() if file == shard)
    raw = bytearray(original)
    for position, new in edits:
        position %= header_bytes
        raw[position : position + len(new)] = new
    return bytes(raw if cut is None else raw[: cut % len(raw)])


def assert_refused_or_sound(written: Written, shard: int, raw: bytes) -> None:
    written.files[shard].write_bytes(raw)
    checkpoint = None
    tracemalloc.start()
    try:
        with contextlib.suppress(CheckpointError):
            checkpoint = open_checkpoint(written.path)
        assert tracemalloc.get_traced_memory()[1] < LARGEST_ALLOCATION_BYTES
    finally:
        tracemalloc.stop()
    if checkpoint is None:
        return
    sizes = [path.stat().st_size for path in checkpoint.files]
    for tensor in checkpoint.tensors.values():
        assert 0 < tensor.offset < tensor.offset + tensor.nbytes <= sizes[tensor.file]
    for layer in checkpoint.layers:
        assert layer.expert_count >= checkpoint.experts_per_token >= 1
        for part in layer.parts:
            for file, offset in zip(part.files.tolist(), part.offsets.tolist(), strict=True):
                assert 0 < offset < offset + part.expert_bytes <= sizes[file]
