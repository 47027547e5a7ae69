"""Hotlists through `expertstream run`: saved by one run, read before the first token of the next."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner, Result

from expertstream import ConfigError, MemoryRequest, ReadFailed
from expertstream_engine import BUNDLED_MODEL, Model, RunSettings
from expertstream_engine.cli.commands import app
from expertstream_engine.demand import plan_run


@pytest.fixture(autouse=True)
def nothing_set_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("EXPERTSTREAM_")]:
        monkeypatch.delenv(name)
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in a folder of its own."""
    return Path(shutil.copy(BUNDLED_MODEL, tmp_path_factory.mktemp("model") / "model.gguf"))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hotlist of a short run."""
    path = tmp_path_factory.mktemp("lists") / "saved.json"
    assert run(model, "--save-hotlist", path).exit_code == 0
    return path


@pytest.fixture
def beside(model: Path, saved: Path) -> Iterator[Path]:
    """A copy of the list where it is found by itself."""
    path = Path(shutil.copy(saved, f"{model}.hotlist.json"))
    yield path
    path.unlink()


def run(model: Path, *options: str | Path) -> Result:
    fixed = ["run", model, "-p", "In the beginning God created", "-n", "12", "--expert-memory", "25%"]
    return CliRunner().invoke(app, [str(argument) for argument in (*fixed, *options)])


def report(model: Path, *options: str | Path) -> Any:
    result = run(model, *options, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def of_another_model(path: Path, *, expert: int = 0) -> None:
    document = json.loads(path.read_text())
    document["model"] |= {"identity": "0" * 32, "name": "another one"}
    document["experts"].append([0, 16 + expert, 0.0]) if expert else None
    path.write_text(json.dumps(document))


def end_in_the_fourth_pass(monkeypatch: pytest.MonkeyPatch, end: BaseException) -> None:
    real_forward, passes = Model._forward, []

    def ending(model: Model, *arguments: Any, **options: Any) -> Any:
        passes.append(1)
        if len(passes) == 4:
            raise end
        return real_forward(model, *arguments, **options)

    monkeypatch.setattr(Model, "_forward", ending)


def test_a_list_names_the_experts_that_were_used(saved: Path) -> None:
    document = json.loads(saved.read_text())
    scores = [score for _, _, score in document["experts"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= 4
    assert document["model"]["expert_counts"] == {str(layer): 16 for layer in range(4)}


def test_a_list_fills_the_slots_before_the_prompt_and_changes_no_token(model: Path, saved: Path) -> None:
    cold, seeded = report(model), report(model, "--hotlist", saved)
    assert seeded["tokens"] == cold["tokens"]
    assert cold["seeded_experts"] == 0
    assert seeded["seeded_experts"] == seeded["slots"] == 14
    assert cold["prefill"]["hits"] == 0
    assert seeded["prefill"]["hits"] > 0
    assert seeded["prefill"]["steps"] == cold["prefill"]["steps"], "seeding is no step"


@pytest.mark.parametrize("policy", ["hotness", "lru"])
def test_a_list_suits_every_policy_and_backend(model: Path, saved: Path, policy: str) -> None:
    found = report(model, "--hotlist", saved, "--policy", policy, "--backend", "metal_compat")
    assert found["seeded_experts"] == 14
    assert found["tokens"] == report(model)["tokens"]


def test_a_list_beside_the_model_is_found_and_the_report_says_so(model: Path, beside: Path) -> None:
    result = run(model)
    assert "14 experts of the hotlist were read before the prompt" in result.stderr
    assert f"note: begins with the experts of {beside}; --hotlist none leaves them out" in result.stderr
    named = run(model, "--hotlist", beside)
    assert named.exit_code == 0
    assert "begins with" not in named.stderr


def test_a_list_beside_the_model_can_be_left_out(model: Path, beside: Path) -> None:
    assert report(model)["seeded_experts"] == 14
    of_another_model(beside)
    assert report(model, "--hotlist", "none")["seeded_experts"] == 0


def test_a_list_of_another_model_found_by_itself_is_refused(model: Path, beside: Path) -> None:
    of_another_model(beside)
    result = run(model)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "is of another model: of 'another one'" in result.stderr
    assert f"--hotlist {beside}" in result.stderr
    planned = CliRunner().invoke(app, ["plan", str(model)])
    assert (planned.exit_code, planned.stderr) == (2, result.stderr)


def test_a_list_of_another_model_that_is_named_is_used_with_a_warning(model: Path, saved: Path, tmp_path: Path) -> None:
    named = Path(shutil.copy(saved, tmp_path / "named.json"))
    of_another_model(named)
    result = run(model, "--hotlist", named)
    assert result.exit_code == 0
    assert "hotlist_of_another_model" in result.stderr
    assert "14 experts of the hotlist" in result.stderr
    of_another_model(named, expert=1)
    refused = run(model, "--hotlist", named)
    assert refused.exit_code == 2
    assert "expert 17 of layer 0" in refused.stderr


def test_seeding_shows_how_far_it_is(model: Path, saved: Path) -> None:
    told: list[tuple[str, int, int]] = []
    settings = RunSettings(hotlist=saved, expert_memory=MemoryRequest.parse("25%"))
    with Model(plan_run(model, settings), settings, lambda *step: told.append(step)) as loaded:
        steps = [(done, total) for what, done, total in told if what == "hot experts"]
        assert len(steps) == loaded.seeded_experts == 14
        assert steps == sorted(set(steps))
        assert steps[-1] == (loaded.streamer.counters.expert_bytes_read,) * 2
        assert told[-1][0] == "hot experts", "nothing is left to do before the first token"


def test_a_list_that_cannot_be_saved_is_refused_before_anything_is_computed(model: Path, tmp_path: Path) -> None:
    result = run(model, "--save-hotlist", tmp_path / "nowhere" / "list")
    assert result.exit_code == 2
    assert "cannot be saved" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("link", [False, True])
def test_a_model_is_never_replaced_by_a_list(model: Path, tmp_path: Path, link: bool) -> None:
    precious = Path(shutil.copy(model, tmp_path / "precious.gguf"))
    named = tmp_path / "link" if link else precious
    if link:
        named.symlink_to(precious)
    result = run(precious, "--save-hotlist", named)
    assert result.exit_code == 2
    assert f"cannot be saved as {named}: it holds something" in result.stderr
    assert "name another file or remove it" in result.stderr
    assert result.stdout == ""
    with Model(plan_run(model, RunSettings()), RunSettings()) as loaded, pytest.raises(ConfigError, match="remove it"):
        loaded.save_hotlist(named)
    assert precious.read_bytes() == model.read_bytes()


def test_a_list_takes_the_place_of_one_of_another_model(model: Path, saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(saved, tmp_path / "list"))
    of_another_model(path)
    assert run(model, "--save-hotlist", path).exit_code == 0
    assert path.read_bytes() == saved.read_bytes()


@pytest.mark.parametrize(("end", "code"), [(ReadFailed("the disk is gone"), 1), (KeyboardInterrupt(), 130)])
def test_what_came_to_be_where_a_list_is_saved_stays_and_hides_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int
) -> None:
    end_in_the_fourth_pass(monkeypatch, end)
    real_generate = Model.generate

    def generate(*arguments: Any, **options: Any) -> Any:
        (tmp_path / "list").write_text("notes")
        return real_generate(*arguments, **options)

    monkeypatch.setattr(Model, "generate", generate)
    result = run(model, "--save-hotlist", tmp_path / "list")
    assert result.exit_code == code
    assert "it holds something" in result.stderr
    assert (tmp_path / "list").read_text() == "notes"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("expertstream.hotlist.os.fsync", fsync)


@pytest.mark.usefixtures("full_disk")
def test_a_list_that_could_not_be_saved_costs_no_result(model: Path, tmp_path: Path) -> None:
    result = run(model, "--save-hotlist", tmp_path / "list", "--json")
    assert result.exit_code == 2
    assert len(json.loads(result.stdout)["tokens"]) == 12
    message = f"error: hotlist {tmp_path / 'list'} cannot be written: No space left on device\n"
    assert result.stderr == message
    result = run(model, "--save-hotlist", tmp_path / "list")
    assert "12 tokens generated" in result.stderr
    assert result.stderr.endswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize(
    ("end", "code", "said_last"),
    [
        (ReadFailed("the disk is gone"), 1, "error: the disk is gone\n"),
        (KeyboardInterrupt(), 130, "cannot be written: No space left on device\n"),
    ],
)
def test_a_list_that_could_not_be_saved_hides_nothing_that_went_wrong_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int, said_last: str
) -> None:
    end_in_the_fourth_pass(monkeypatch, end)
    result = run(model, "--save-hotlist", tmp_path / "list")
    assert result.exit_code == code
    assert f"hotlist {tmp_path / 'list'} cannot be written" in result.stderr
    assert result.stderr.endswith(said_last)
    assert ("3 tokens generated, ended by interruption" in result.stderr) == isinstance(end, KeyboardInterrupt)


@pytest.mark.parametrize(("end", "code"), [(ReadFailed("the disk is gone"), 1), (KeyboardInterrupt(), 130)])
def test_a_list_is_saved_of_what_was_done_until_the_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int
) -> None:
    end_in_the_fourth_pass(monkeypatch, end)
    assert run(model, "--save-hotlist", tmp_path / "list").exit_code == code
    assert json.loads((tmp_path / "list").read_text())["experts"]


def test_a_list_is_saved_again_with_what_the_seeds_became(model: Path, saved: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    assert run(model, "--hotlist", saved, "--save-hotlist", again).exit_code == 0
    experts = {(layer, expert) for layer, expert, _ in json.loads(again.read_text())["experts"]}
    assert len(experts) >= 14
