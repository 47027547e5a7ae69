"""The command that runs the suite: what it says first, what it refuses, and what it lets have no say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from suite_runs import run_suite

ONE_TEST = ("-k", "test_zero_slots_asked_for_are_zero_slots")


def installed_module(site: Path, name: str, source: str) -> None:
    """A distribution `some-package` with one module, which offers itself as a backend."""
    info = site / f"{name}-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[expertstream.backends]\n{name} = {name}\n")
    (site / f"{name}.py").write_text(source)


def refusal(output: str) -> str:
    """The one line that pytest prints of a run that it does not begin."""
    lines = [line for line in output.splitlines() if line.strip()]
    assert len(lines) == 1, output
    return lines[0]


def test_the_header_says_what_is_tested(tmp_path: Path) -> None:
    ended = run_suite("cpu", *ONE_TEST, folder=tmp_path)
    assert ended.exit_code == 0
    assert re.search(
        r"^expertstream backend: cpu of expertstream \d\S*, device: .+, host memory is device addressable$",
        ended.output,
        re.MULTILINE,
    ), ended.output


def test_an_unknown_backend_is_one_line_and_exit_code_4(tmp_path: Path) -> None:
    ended = run_suite("cpuu", folder=tmp_path)
    assert ended.exit_code == 4
    assert re.search(r"no backend is called 'cpuu'.*did you mean 'cpu'", refusal(ended.output))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libdevice.so.1 is not\\nthere')", r"libdevice\.so\.1 is not there"),
        ("EXPERTSTREAM_CONTRACT = 1", r"budget_for_expert_size"),
        ("EXPERTSTREAM_CONTRACT = 99", r"99"),
        (
            "from expertstream import *\n"
            "from expertstream_cpu import budget_for_expert_size, alloc_slot_store, commit_slot\n"
            "EXPERTSTREAM_CONTRACT = 1\n"
            "@hookimpl\n"
            "def host_memory_is_device_addressable():\n"
            "    raise BackendUnavailable('no device answers')\n",
            r"no device answers",
        ),
    ],
    ids=["import", "hooks", "contract", "device"],
)
def test_an_unusable_backend_is_one_line_and_exit_code_4(tmp_path: Path, source: str, reason: str) -> None:
    installed_module(tmp_path / "site", "unusable", source)
    ended = run_suite("unusable", folder=tmp_path, site=tmp_path / "site")
    assert ended.exit_code == 4
    assert re.search(reason, refusal(ended.output)), ended.output


def test_an_option_that_the_backend_does_not_have_is_refused(tmp_path: Path) -> None:
    ended = run_suite("cpu", "--backend-option", "cpu.speed=9", folder=tmp_path)
    assert ended.exit_code == 4
    assert "cpu.speed" in refusal(ended.output)


def test_the_folders_own_pytest_settings_have_no_say(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = here\npython_files = check_*.py\naddopts = -q\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('this conftest was read')\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "check_this.py").write_text("def test_of_the_folder(): assert False\n")
    ended = run_suite("cpu", *ONE_TEST, folder=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "1 passed" in ended.output


def test_a_test_file_that_is_named_runs_instead_of_the_suite_with_its_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from expertstream.conformance.experts import SMALL\n\n\n"
        "def test_mine(backend, open_slots, streams):\n"
        "    assert open_slots(SMALL, 2).store.slot_count == 2\n"
    )
    ended = run_suite("cpu", "test_mine.py", folder=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "1 passed" in ended.output


def test_what_a_backends_distribution_adds_is_collected_too(tmp_path: Path) -> None:
    ended = run_suite("fakedevice", "-k", "test_any_number_of_staging_buffers_will_do or zero_slots", folder=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "3 passed" in ended.output


def test_a_skip_says_which_ability_is_missing(tmp_path: Path) -> None:
    ended = run_suite("cpu", "-rs", "-k", "test_a_commit_that_failed_says_so", folder=tmp_path)
    assert "have no fixture break_next_commit" in ended.output
