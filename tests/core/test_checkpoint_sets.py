"""A checkpoint is found from a file, any shard or a folder; what is missing or contradictory is refused by name."""

import os
import re
import shutil
import struct

import pytest

from checkpoint_files import I32, MIXED_LAYERS, U16, write_checkpoint
from expertstream.checkpoint import Checkpoint, open_checkpoint
from expertstream.errors import CheckpointError

U16_OF_1, U16_OF_3, U16_OF_4 = (struct.pack("<IH", 2, number) for number in (1, 3, 4))
I32_OF_22, F32_OF_22 = struct.pack("<Ii", 5, 22), struct.pack("<If", 6, 22.0)


def contents(checkpoint: Checkpoint) -> object:
    """Everything an index says, comparable."""
    layers = [
        (
            layer.layer,
            [(part.name, part.expert_bytes, part.files.tolist(), part.offsets.tolist()) for part in layer.parts],
        )
        for layer in checkpoint.layers
    ]
    return checkpoint.files, dict(checkpoint.tensors), layers, checkpoint.identity, sorted(checkpoint.metadata)


def refusal(path: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def test_a_set_is_the_same_through_any_shard_its_folder_and_a_relative_path(tmp_path, monkeypatch):
    written = write_checkpoint(tmp_path / "T.gguf", shards=3)
    wanted = contents(open_checkpoint(written.files[0]))
    monkeypatch.chdir(tmp_path)
    for path in (written.files[1], written.files[2], tmp_path, str(tmp_path), "T-00002-of-00003.gguf"):
        assert contents(open_checkpoint(path)) == wanted
    assert open_checkpoint(written.files[2]).files == written.files


def test_tensors_of_every_shard_have_its_file_number(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", shards=3)
    checkpoint = open_checkpoint(written.files[2])
    used = {tensor.file for tensor in checkpoint.tensors.values()}
    used |= {int(number) for layer in checkpoint.layers for part in layer.parts for number in part.files}
    assert used == {0, 1, 2}


def test_a_first_shard_may_hold_metadata_alone(tmp_path):
    layers = [{"gate": "F16", "up": "F16", "down": "F16"}]
    tensor_count = len(write_checkpoint(tmp_path / "whole.gguf", layers).places)
    written = write_checkpoint(tmp_path / "T.gguf", layers, shards=tensor_count + 1)
    assert all(file > 0 for file, _, _ in written.places.values())
    checkpoint = open_checkpoint(written.path)
    assert {tensor.file for tensor in checkpoint.tensors.values()} < set(range(1, tensor_count + 1))
    assert len(checkpoint.layers) == 1


def test_a_folder_with_two_checkpoints_asks_for_a_choice(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", shards=3)
    write_checkpoint(tmp_path / "other.gguf")
    written.files[1].unlink()
    message = refusal(tmp_path)
    assert "2 checkpoints" in message
    assert f"{written.files[0]} (2 of 3 shards)" in message
    assert f"{tmp_path / 'other.gguf'}" in message


def test_one_bad_file_does_not_hide_the_good_ones(tmp_path):
    for name in ("a", "b"):
        write_checkpoint(tmp_path / f"{name}.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    message = refusal(tmp_path)
    assert all(str(tmp_path / f"{name}.gguf") in message for name in ("a", "b", "bad", "loop"))


def test_a_folder_ignores_other_files_hidden_files_and_folders(tmp_path):
    written = write_checkpoint(tmp_path / "T.GGUF")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "._T.gguf").write_bytes(b"left by a system that copies attributes")
    (tmp_path / "folder.gguf").mkdir()
    assert open_checkpoint(tmp_path).files == written.files


def test_a_file_named_one_of_one_opens_with_and_without_split_keys(tmp_path):
    plain = write_checkpoint(tmp_path / "T-00001-of-00001.gguf")
    assert open_checkpoint(tmp_path).files == plain.files
    keys = {"split.no": U16(0), "split.count": U16(1), "split.tensors.count": I32(len(plain.places))}
    write_checkpoint(tmp_path / "T-00001-of-00001.gguf", metadata=keys)
    assert len(open_checkpoint(tmp_path).layers) == 4


def test_a_merged_file_that_kept_its_split_keys_opens(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", metadata={"split.no": U16(0), "split.count": U16(0)})
    assert open_checkpoint(written.path).files == (written.path,)


def test_links_are_followed_and_keep_their_names(tmp_path):
    store, links = tmp_path / "store", tmp_path / "links"
    store.mkdir()
    links.mkdir()
    written = write_checkpoint(store / "T.gguf", shards=3)
    for number, file in enumerate(written.files):
        file.rename(store / f"digest{number}")
        (links / file.name).symlink_to(store / f"digest{number}")
    checkpoint = open_checkpoint(links / written.files[1].name)
    assert [file.name for file in checkpoint.files] == [file.name for file in written.files]
    assert {file.parent for file in checkpoint.files} == {links}


def test_missing_shards_are_named_by_number(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", shards=9)
    for number in (4, 5, 6, 9):
        written.files[number - 1].unlink()
    wanted = "5 of 9 shards are there (1-3, 7-8), missing: 4-6, 9"
    assert wanted in refusal(written.files[0])
    assert wanted in refusal(written.files[3])  # one of the missing
    assert wanted in refusal(tmp_path)


def test_a_missing_path_and_a_broken_link_are_told_apart(tmp_path):
    (tmp_path / "link.gguf").symlink_to("gone.gguf")
    assert "does not exist; give a GGUF file" in refusal(tmp_path / "no.gguf")
    assert "does not exist; give a GGUF file" in refusal(tmp_path / "no-00001-of-00003.gguf")
    assert "does not exist; give a GGUF file" in refusal(tmp_path / "link.gguf" / "below")
    assert "a link to gone.gguf, which does not exist" in refusal(tmp_path / "link.gguf")
    assert "a link to gone.gguf, which does not exist" in refusal(tmp_path)
    (tmp_path / "link.gguf").unlink()
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    assert "loop.gguf: cannot be looked at" in refusal(tmp_path / "loop.gguf")


def test_a_folder_without_a_checkpoint_says_what_it_holds(tmp_path):
    assert "it is empty" in refusal(tmp_path)
    for number in range(7):
        (tmp_path / f"model-{number}.safetensors").touch()
    assert "it holds model-0.safetensors, model-1.safetensors" in refusal(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_is_said(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf")
    written.path.chmod(0)
    assert "Permission denied" in refusal(written.path)
    (tmp_path / "shut").mkdir(mode=0o300)
    assert "Permission denied" in refusal(tmp_path / "shut")


def test_a_refusal_of_the_system_is_passed_on(tmp_path, monkeypatch):
    # The same promise where the tests run as root.
    written = write_checkpoint(tmp_path / "T.gguf")

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("expertstream.checkpoint.header.FileIO", refuse)
    assert f"{written.path}: cannot be opened: Permission denied" in refusal(written.path)
    monkeypatch.setattr("os.listdir", refuse)
    assert f"{tmp_path}: the folder cannot be listed: Permission denied" in refusal(tmp_path)


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")


def test_every_short_shard_is_named_in_one_message(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", shards=5)
    sizes = [path.stat().st_size for path in written.files]
    os.truncate(written.files[1], sizes[1] - 5000)
    os.truncate(written.files[2], 150)  # inside its header
    os.truncate(written.files[4], 0)
    message = refusal(written.path)
    assert "3 of 5 files shorter than their headers say" in message
    declared = max(offset + nbytes for file, offset, nbytes in written.places.values() if file == 1)
    have = sizes[1] - 5000
    assert (
        f"{written.files[1]}: its tensors end at byte {declared} and the file at {have}, {declared - have} bytes"
        in message
    )
    assert f"{written.files[2]}: " in message
    assert "the file ends at byte 150" in message
    assert f"{written.files[4]}: the file is empty" in message
    assert str(written.files[0]) not in message
    assert str(written.files[3]) not in message


def test_one_missing_byte_is_enough_to_refuse(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf")
    size = written.path.stat().st_size
    os.truncate(written.path, size - 1)
    assert f"its tensors end at byte {size} and the file at {size - 1}, 1 bytes too early" in refusal(written.path)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (b"split.count" + U16_OF_3, b"split.count" + U16_OF_4, "split.count is 4, .* must be 3"),
        (b"split.count", b"split.cOunt", "split.count is absent, .* must be 3"),
        (b"split.no" + U16_OF_1, b"split.no" + U16_OF_3, "split.no is 3, .* must be 1"),
        (b"split.no", b"split.nO", "split.no is absent, .* must be 1"),
        (b"split.tensors.count", b"split.tensors.cOunt", "split.tensors.count is absent, .* must be 22"),
        (b"split.tensors.count" + I32_OF_22, b"split.tensors.count" + F32_OF_22, "split.tensors.count is 22.0, "),
    ],
)
def test_shards_that_disagree_are_refused(tmp_path, right, wrong, said):
    written = write_checkpoint(tmp_path / "T.gguf", shards=3)
    raw = written.files[1].read_bytes()
    assert raw.count(right) == 1
    written.files[1].write_bytes(raw.replace(right, wrong))
    message = refusal(written.path)
    assert message.startswith(f"{written.files[1]}: ")
    assert re.search(said, message)


def test_shards_in_each_others_place_are_refused(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", shards=3)
    written.files[0].rename(tmp_path / "swap")
    written.files[1].rename(written.files[0])
    (tmp_path / "swap").rename(written.files[1])
    message = refusal(written.path)
    assert f"{written.files[0]}: split.no is 1" in message
    assert "must be 0" in message


def test_a_shard_of_another_model_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    written = write_checkpoint(tmp_path / "T.gguf", shards=3)
    other = write_checkpoint(tmp_path / "other" / "T.gguf", MIXED_LAYERS[:2], shards=3)
    shutil.copy(other.files[1], written.files[1])
    assert "split.tensors.count is" in refusal(written.path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    written = write_checkpoint(tmp_path / "T.gguf", shards=2)
    raw = written.files[1].read_bytes()
    assert raw.count(b"blk.3.attn_norm.weight") == 1
    written.files[1].write_bytes(raw.replace(b"blk.3.attn_norm.weight", b"blk.0.attn_norm.weight"))
    message = refusal(written.path)
    assert "tensor 'blk.0.attn_norm.weight' is also in" in message
    assert str(written.files[0]) in message


@pytest.mark.parametrize("count", [3, [3, 3], "3"], ids=repr)
def test_a_renamed_shard_is_told_its_name_is_lost(tmp_path, count):
    written = write_checkpoint(tmp_path / "T.gguf", metadata={"split.count": count})
    message = refusal(written.path)
    assert "one of several shards (split.count is " in message
    assert "give the shards their names back" in message


def test_names_outside_their_own_count_are_no_shard_names(tmp_path):
    written = write_checkpoint(tmp_path / "T-00004-of-00003.gguf")
    assert open_checkpoint(written.path).files == (written.path,)
