"""Hotlists: what is written is read, what is damaged or of another model is refused, and no list is lost on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint_files
from expertstream import (
    Checkpoint,
    ConfigError,
    ExpertKey,
    MachineError,
    choose_hotlist,
    hotlist_beside,
    hotlist_of,
    open_checkpoint,
    read_hotlist,
    refuse_unwritable,
    write_hotlist,
)
from expertstream.hotlist import Hotlist

SCORES = {ExpertKey(3, 7): 12.5, ExpertKey(0, 2): 12.5, ExpertKey(1, 0): 0.1}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Four layers of eight experts, in two shards."""
    return open_checkpoint(checkpoint_files.write_checkpoint(tmp_path / "telling.gguf", shards=2).path)


@pytest.fixture
def another(tmp_path: Path) -> Checkpoint:
    """A model with as many experts and another header."""
    metadata = {"general.name": "another one"}
    return open_checkpoint(checkpoint_files.write_checkpoint(tmp_path / "another.gguf", metadata=metadata).path)


@settings(deadline=None)  # it writes a file to disk
@given(
    scores=st.dictionaries(
        st.builds(ExpertKey, st.integers(0, 200), st.integers(0, 500)),
        st.floats(min_value=0, allow_infinity=False, allow_nan=False),
    ),
    name=st.text(),
)
def test_a_list_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, scores: dict[ExpertKey, float], name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    write_hotlist(path, Hotlist("0123", name, 8, {0: 128, 7: 64}, scores))
    found = read_hotlist(path)
    assert (found.identity, found.model_name, found.experts_per_token) == ("0123", name, 8)
    assert found.expert_counts == {0: 128, 7: 64}
    assert list(found.scores.items()) == list(scores.items()), "the order is the ranking"


def test_a_list_tells_its_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    write_hotlist(tmp_path / "list", hotlist_of(checkpoint, SCORES))
    document = json.loads((tmp_path / "list").read_text())
    assert document["version"] == 1
    assert document["model"]["identity"] == checkpoint.identity
    assert document["model"]["expert_counts"] == {"0": 8, "1": 8, "2": 8, "3": 8}
    assert document["model"]["experts_per_token"] == 2
    assert document["experts"][0] == [3, 7, 12.5]


class TestChoosing:
    def test_without_a_list_there_is_none(self, checkpoint: Checkpoint) -> None:
        assert choose_hotlist(checkpoint, None) is None

    def test_a_list_beside_the_first_file_is_found_by_itself(self, checkpoint: Checkpoint) -> None:
        beside = hotlist_beside(checkpoint)
        assert beside == checkpoint.files[0].parent / "telling-00001-of-00002.gguf.hotlist.json"
        write_hotlist(beside, hotlist_of(checkpoint, SCORES))
        found = choose_hotlist(checkpoint, None)
        assert found is not None
        assert found.scores == SCORES

    def test_a_list_that_the_user_names_goes_before_it(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        write_hotlist(hotlist_beside(checkpoint), hotlist_of(checkpoint, SCORES))
        write_hotlist(tmp_path / "mine", hotlist_of(checkpoint, {ExpertKey(2, 2): 1.0}))
        found = choose_hotlist(checkpoint, tmp_path / "mine")
        assert found is not None
        assert list(found.scores) == [ExpertKey(2, 2)]

    def test_a_list_of_another_model_found_by_itself_is_refused(
        self, checkpoint: Checkpoint, another: Checkpoint
    ) -> None:
        write_hotlist(hotlist_beside(checkpoint), hotlist_of(another, SCORES))
        with pytest.raises(ConfigError, match=r"of another model: of 'another one' .*naming it: --hotlist"):
            choose_hotlist(checkpoint, None)

    def test_a_list_of_another_model_that_the_user_names_is_used_with_a_warning(
        self, checkpoint: Checkpoint, another: Checkpoint, tmp_path: Path
    ) -> None:
        write_hotlist(tmp_path / "list", hotlist_of(another, SCORES))
        with structlog.testing.capture_logs() as log:
            found = choose_hotlist(checkpoint, tmp_path / "list")
        assert found is not None
        assert found.scores == SCORES
        assert [(entry["event"], entry["log_level"]) for entry in log] == [("hotlist_of_another_model", "warning")]
        assert log[0]["its_identity"] == another.identity

    @pytest.mark.parametrize("key", [ExpertKey(4, 0), ExpertKey(0, 8)])
    def test_a_list_with_experts_that_do_not_exist_is_refused(
        self, checkpoint: Checkpoint, another: Checkpoint, tmp_path: Path, key: ExpertKey
    ) -> None:
        for model, why in ((another, "of another model"), (checkpoint, "damaged")):
            write_hotlist(tmp_path / "list", hotlist_of(model, SCORES | {key: 0.0}))
            with pytest.raises(
                ConfigError, match=rf"{why}.*expert {key.expert} of layer {key.layer} and 0 more of .*4"
            ):
                choose_hotlist(checkpoint, tmp_path / "list")

    def test_a_list_that_is_not_there_is_refused_if_the_user_names_it(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(ConfigError, match="nowhere cannot be read: No such file"):
            choose_hotlist(checkpoint, Path("nowhere"))


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_set("format", to="something else"), "does not say format"),
        (_set("version", to=2), "its version is 2"),
        (_set("model", to=None), "its model or its experts"),
        (_set("model", "identity", to=7), "its model or its experts"),
        (_set("model", "expert_counts", to={"zero": 8}), "zero"),
        (_set("experts", to={}), "its model or its experts"),
        (_set("experts", 0, to=[3, 7]), r"\[3, 7\] is not a layer, an expert and a score"),
        (_set("experts", 0, 0, to=-1), "is not a layer"),
        (_set("experts", 0, 1, to=1.5), "is not a layer"),
        (_set("experts", 0, 2, to=float("nan")), "is not a layer"),
        (_set("experts", 0, 2, to=float("inf")), "is not a layer"),
        (_set("experts", 0, 2, to="hot"), "is not a layer"),
        (_set("experts", 0, 2, to=10**400), "too large"),
        (_set("experts", 1, to=[3, 7, 1.0]), "names expert 7 of layer 3 twice"),
    ],
)
def test_a_damaged_list_is_refused_with_the_reason(
    checkpoint: Checkpoint, tmp_path: Path, change: Callable[[Any], None], why: str
) -> None:
    path = tmp_path / "list"
    write_hotlist(path, hotlist_of(checkpoint, SCORES))
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=rf"list is not a hotlist of version 1: .*{why}"):
        read_hotlist(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"\xff\xfe\x00", b"{" * 40, b"[" * 100_000])
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "list").write_bytes(content)
    with pytest.raises(ConfigError, match="is not a hotlist of version 1"):
        read_hotlist(tmp_path / "list")


@pytest.mark.parametrize("by_itself", [False, True])
def test_only_an_ordinary_file_no_longer_than_a_list_is_read(
    checkpoint: Checkpoint, tmp_path: Path, by_itself: bool
) -> None:
    path = hotlist_beside(checkpoint) if by_itself else tmp_path / "list"

    def refused(why: str) -> None:
        with pytest.raises(ConfigError, match=f"hotlist {path} cannot be read: {why}"):
            choose_hotlist(checkpoint, None if by_itself else path)
        path.unlink()

    os.mkfifo(path)  # who opened it would wait for somebody who writes
    refused("it is a pipe, not an ordinary file")
    path.symlink_to("/dev/zero")
    refused("it is a character device, not an ordinary file")
    path.touch()
    os.truncate(path, 64 * 1024**2 + 1)  # a hole, which takes no room
    refused("it is longer than 67108864 bytes")


def test_a_model_whose_name_leaves_no_room_for_a_list_beside_it_has_none(tmp_path: Path) -> None:
    name = "x" * (os.pathconf(tmp_path, "PC_NAME_MAX") - len(".gguf")) + ".gguf"
    checkpoint = open_checkpoint(checkpoint_files.write_checkpoint(tmp_path / name).path)
    assert choose_hotlist(checkpoint, None) is None


def test_a_list_that_cannot_be_written_leaves_the_old_one(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lists"
    folder.mkdir()
    write_hotlist(folder / "list", hotlist_of(checkpoint, SCORES))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="list cannot be written: No space left"):
        write_hotlist(folder / "list", hotlist_of(checkpoint, {}))
    assert read_hotlist(folder / "list").scores == SCORES
    assert os.listdir(folder) == ["list"]


def test_writing_through_a_link_keeps_the_link(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_hotlist(tmp_path / "link", hotlist_of(checkpoint, SCORES))
    assert (tmp_path / "link").is_symlink()
    assert read_hotlist(tmp_path / "target").scores == SCORES


def test_where_nothing_can_be_written_is_known_beforehand(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "new")
    with pytest.raises(ConfigError, match="nowhere is no folder that can be written to"):
        refuse_unwritable(tmp_path / "nowhere" / "new")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is no folder that can be written to"):
        refuse_unwritable(tmp_path / "file" / "new")
    with pytest.raises(ConfigError, match="it is a folder"):
        refuse_unwritable(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # a list would take its place
    with pytest.raises(ConfigError, match="it is a pipe, not an ordinary file"):
        refuse_unwritable(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a character device"):
        refuse_unwritable(Path(os.devnull))
    with pytest.raises(ConfigError, match="null"):
        refuse_unwritable(tmp_path / "a\0b")
    with pytest.raises(ConfigError, match="xxx: File name too long"):
        refuse_unwritable(tmp_path / ("x" * 300))
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ConfigError, match="circle: Too many levels"):
        refuse_unwritable(tmp_path / "circle")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may search everything")
def test_a_folder_that_may_not_be_searched_is_known_beforehand(tmp_path: Path) -> None:
    (folder := tmp_path / "shut").mkdir(mode=0o600)
    with pytest.raises(ConfigError, match="shut/list: Permission denied"):
        refuse_unwritable(folder / "list")


def test_what_may_not_be_looked_at_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(ConfigError, match=r"saved as .*list: Permission denied"):
        refuse_unwritable(tmp_path / "list")
    with pytest.raises(ConfigError, match="list cannot be read: Permission denied"):
        read_hotlist(tmp_path / "list")


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("save", [refuse_unwritable, lambda path: write_hotlist(path, Hotlist("0", "m", 1, {}, {}))])
def test_a_list_takes_the_place_of_lists_and_empty_files_alone(
    checkpoint: Checkpoint, tmp_path: Path, save: Callable[[Path], None], link: bool
) -> None:
    held, path = tmp_path / "held", tmp_path / ("link" if link else "held")
    if link:
        path.symlink_to(held)
    for content in (
        checkpoint.files[0].read_bytes(),
        b"{}",
        b"\n",
        b'{"format": "expertstream-hotlist", "version": 2}',
    ):
        held.write_bytes(content)
        with pytest.raises(ConfigError, match=f"saved as {path}: it holds something .* name another file or remove it"):
            save(path)
        assert held.read_bytes() == content
    held.write_bytes(b"")
    save(path)
    held.unlink()
    write_hotlist(held, hotlist_of(checkpoint, SCORES))
    save(path)
    assert path.is_symlink() == link


def test_the_longest_name_that_a_folder_takes_is_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / ("x" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    refuse_unwritable(path)
    write_hotlist(path, hotlist_of(checkpoint, SCORES))
    assert read_hotlist(path).scores == SCORES
