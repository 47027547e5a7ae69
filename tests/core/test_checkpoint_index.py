"""A good checkpoint is indexed exactly: ranges, types and shapes, against the generator and the gguf package."""

import gc
import math
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

import checkpoint_files
from checkpoint_files import MIXED_LAYERS, Written, write_checkpoint
from expertstream.checkpoint import Checkpoint, open_checkpoint

GATE_UP_LAYERS = ({"gate_up": "Q6_K", "down": "Q8_0"}, {"gate_up": "MXFP4", "down": "MXFP4"})
EVERY_TYPE_LAYERS = [{"gate": name, "up": name, "down": name} for name in checkpoint_files.TYPES]


def read(checkpoint: Checkpoint, file: int, offset: int, nbytes: int) -> bytes:
    with checkpoint.files[file].open("rb") as stream:
        stream.seek(offset)
        return stream.read(nbytes)


def assert_index_is(checkpoint: Checkpoint, written: Written) -> None:
    assert checkpoint.files == written.files
    parts = [(layer.layer, part) for layer in checkpoint.layers for part in layer.parts]
    assert [(layer, part.name, part.expert_bytes) for layer, part in parts] == [
        (layer, part, nbytes) for (layer, part), nbytes in written.parts.items()
    ]
    for layer, part in parts:
        assert len(part.files) == len(part.offsets) == written.expert_count
        for expert in range(written.expert_count):
            found = read(checkpoint, part.files[expert], int(part.offsets[expert]), part.expert_bytes)
            assert found == written.part_bytes(layer, expert, part.name)
    resident = {name: place for name, place in written.places.items() if "_exps.weight" not in name}
    assert {name: (t.file, t.offset, t.nbytes) for name, t in checkpoint.tensors.items()} == resident
    assert checkpoint.resident_bytes == sum(nbytes for _, _, nbytes in resident.values())
    assert checkpoint.routed_bytes == written.expert_count * sum(written.parts.values())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
@pytest.mark.parametrize("layers", [MIXED_LAYERS, GATE_UP_LAYERS], ids=["mixed", "gate_up"])
def test_every_expert_and_resident_tensor_is_where_the_index_says(tmp_path, layers, alignment, shards):
    written = write_checkpoint(tmp_path / "T.gguf", layers, alignment=alignment, shards=shards)
    assert_index_is(open_checkpoint(written.path), written)


def test_every_type_has_its_exact_expert_size(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", EVERY_TYPE_LAYERS, expert_count=2)
    checkpoint = open_checkpoint(written.path)
    assert_index_is(checkpoint, written)
    sizes = {layer.parts[0].type_name: layer.parts[0].expert_bytes for layer in checkpoint.layers}
    # The numbers are those of the field's reports, for 65,536 weights.
    published = {"IQ2_XXS": 16_896, "Q2_K": 21_504, "MXFP4": 34_816, "Q4_K": 36_864, "Q6_K": 53_760, "Q8_0": 69_632}
    assert published.items() <= sizes.items()
    assert sizes["F16"] == sizes["BF16"] == 131_072


def test_layers_quantized_differently_keep_their_own_sizes(tmp_path):
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "T.gguf").path)
    assert [layer.expert_bytes for layer in checkpoint.layers] == [55_296, 55_296, 55_296, 110_592]
    assert checkpoint.routed_bytes == 2_211_840


def test_shapes_are_in_numpy_order(tmp_path):
    written = write_checkpoint(
        tmp_path / "T.gguf", [{"gate": "Q4_0", "up": "Q8_0", "down": "F16"}], hidden=320, width=64
    )
    checkpoint = open_checkpoint(written.path)
    assert [part.shape for part in checkpoint.layers[0].parts] == [(64, 320), (64, 320), (320, 64)]
    assert checkpoint.tensors["token_embd.weight"].shape == (32, 320)
    assert checkpoint.experts_per_token == 2


def test_a_file_of_the_gguf_package_reads_as_the_package_reads_it(tmp_path):
    path = tmp_path / "T.gguf"
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "testmoe")
    writer.add_expert_count(3)
    writer.add_expert_used_count(2)
    writer.add_custom_alignment(128)
    writer.add_token_list(["a", "é", "", "日本", "x" * 1000])
    writer.add_token_scores([0.5, -1.0, 2.0, 0.0, 3.0])
    writer.add_token_types([1, 1, 3, 1, 6])
    writer.add_add_bos_token(True)
    writer.add_uint64("test.u64", 2**63)
    writer.add_int64("test.i64", -(2**62))
    writer.add_float64("test.f64", 0.1)
    writer.add_int8("test.i8", -7)
    writer.add_array("test.flags", [True, False, True])
    for name, shape in (("gate", (3, 32, 64)), ("up", (3, 32, 64)), ("down", (3, 64, 32))):
        raw = gguf.quants.quantize(rng.standard_normal(shape, np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    checkpoint, reader = open_checkpoint(path), gguf.GGUFReader(path)
    theirs = {
        t.name: (t.tensor_type.name, int(t.data_offset), int(t.n_bytes), tuple(t.shape[::-1])) for t in reader.tensors
    }
    norm = checkpoint.tensors["output_norm.weight"]
    ours = {norm.name: (norm.type_name, norm.offset, norm.nbytes, norm.shape)}
    (layer,) = checkpoint.layers
    for part in layer.parts:
        name = f"blk.0.ffn_{part.name}_exps.weight"
        ours[name] = (part.type_name, int(part.offsets[0]), 3 * part.expert_bytes, (3, *part.shape))
        data = next(t.data for t in reader.tensors if t.name == name)
        for expert in range(3):
            assert read(checkpoint, 0, int(part.offsets[expert]), part.expert_bytes) == data[expert].tobytes()
    assert ours == theirs
    for key, value in checkpoint.metadata.items():
        wanted = reader.get_field(key).contents()
        assert list(value) == list(wanted) if isinstance(value, tuple | np.ndarray) else value == wanted, key
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ("a", "é", "", "日本", "x" * 1000)
    assert checkpoint.metadata["tokenizer.ggml.add_bos_token"] is True
    assert checkpoint.metadata["test.flags"].dtype == np.bool_
    assert checkpoint.metadata["tokenizer.ggml.scores"].dtype == np.float32


@pytest.mark.parametrize("longest", [10, 700_000], ids=["short", "longer than a read"])
def test_string_arrays_survive_the_edges_of_the_read_window(tmp_path, longest):
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 40, 30_000).tolist()
    lengths[15_000] = longest
    texts = [f"é{number}"[:length] + "x" * (length - 6) for number, length in enumerate(lengths)]
    written = write_checkpoint(tmp_path / "T.gguf", metadata={"test.texts": texts, "test.after": 77})
    checkpoint = open_checkpoint(written.path)
    assert checkpoint.metadata["test.texts"] == tuple(texts)
    assert checkpoint.metadata["test.after"] == 77
    assert_index_is(checkpoint, written)


def test_a_version_2_file_reads_as_version_3_does(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf")
    raw = bytearray(written.path.read_bytes())
    raw[4] = 2
    written.path.write_bytes(raw)
    assert_index_is(open_checkpoint(written.path), written)


def test_tensors_may_lie_in_any_order_and_leave_gaps(tmp_path):
    more = [
        checkpoint_files.Tensor("late.weight", "F32", (8,), bytes(32), offset=8 * 2**20),
        checkpoint_files.Tensor("early.weight", "F32", (8,), bytes(32), offset=4 * 2**20),
    ]
    written = write_checkpoint(tmp_path / "T.gguf", more_tensors=more)
    assert_index_is(open_checkpoint(written.path), written)


def test_offsets_beyond_four_gib_are_exact(tmp_path):
    far = checkpoint_files.Tensor("far.weight", "F32", (8,), bytes(range(32)), offset=5 * 2**30)
    written = write_checkpoint(tmp_path / "T.gguf", more_tensors=[far])
    tensor = open_checkpoint(written.path).tensors["far.weight"]
    assert (tensor.file, tensor.offset, tensor.nbytes) == written.places["far.weight"]
    assert tensor.offset > 2**32


def test_a_tensor_without_dimensions_is_one_element(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", more_tensors=[checkpoint_files.resident("scale.weight", "F32")])
    tensor = open_checkpoint(written.path).tensors["scale.weight"]
    assert (tensor.shape, math.prod(tensor.shape), tensor.nbytes) == ((), 1, 4)


def test_the_index_cannot_be_changed(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", metadata={"test.numbers": [1, 2]})
    checkpoint = open_checkpoint(written.path)
    part = checkpoint.layers[0].parts[0]
    for array in (part.offsets, part.files, checkpoint.metadata["test.numbers"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    with pytest.raises(TypeError):
        checkpoint.tensors["x"] = None
    with pytest.raises(TypeError):
        checkpoint.metadata["x"] = None


def test_no_file_stays_open_and_no_byte_changes(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", shards=3)
    before = [path.read_bytes() for path in written.files]
    for path in written.files:
        path.chmod(0o444)
    checkpoint = open_checkpoint(written.path)
    gc.collect()  # an unclosed file would warn, and warnings are errors
    assert open_paths().isdisjoint(map(str, checkpoint.files))
    assert [path.read_bytes() for path in written.files] == before


def open_paths() -> set[str]:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("no /proc on this system")
    return {os.readlink(entry) for entry in descriptors.iterdir() if entry.is_symlink()}


def test_equal_headers_have_one_identity_and_others_another(tmp_path):
    for folder in ("a", "b", "c", "d"):
        (tmp_path / folder).mkdir()
    one = open_checkpoint(write_checkpoint(tmp_path / "a" / "T.gguf").path)
    renamed = open_checkpoint(write_checkpoint(tmp_path / "b" / "other.gguf").path)
    other_key = open_checkpoint(write_checkpoint(tmp_path / "c" / "T.gguf", metadata={"general.name": "x"}).path)
    longer = write_checkpoint(tmp_path / "d" / "T.gguf").path
    with longer.open("ab") as stream:
        stream.write(b"tail")
    assert one.identity == renamed.identity
    assert len({one.identity, other_key.identity, open_checkpoint(longer).identity}) == 3


def test_the_identity_covers_a_header_of_many_reads(tmp_path):
    texts = ["word"] * 100_000  # over a megabyte, so several reads
    identities = set()
    for position in (0, 50_000, 99_999):
        changed = [*texts[:position], "wort", *texts[position + 1 :]]
        identities.add(
            open_checkpoint(write_checkpoint(tmp_path / "T.gguf", metadata={"test.texts": changed}).path).identity
        )
    assert len(identities) == 3
