"""The command that runs the suite: what it says first and of a failure, what it refuses, what it lets have no say."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from suite_runs import install, install_broken, run_suite

ONE_TEST = ("-k", "test_zero_slots_asked_for_are_zero_slots")
ANY_ORDER = "test_any_order_of_calls_leaves_the_last_committed_expert"


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
    install(tmp_path / "site", "some-package", {"unusable": "unusable"}, {})
    (tmp_path / "site" / "unusable.py").write_text(source)
    ended = run_suite("unusable", folder=tmp_path, site=tmp_path / "site")
    assert ended.exit_code == 4
    assert re.search(reason, refusal(ended.output)), ended.output


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"more.py": "import pytest\n"}, r"are no package: .* a folder with an __init__\.py, not 'more'"),
        ({}, r"cannot be imported: ModuleNotFoundError: No module named 'more'; repair or uninstall some-package"),
        ({"more/__init__.py": "import libdevice"}, r"cannot be imported: ModuleNotFoundError: .*'libdevice'; repair"),
        ({"more/__init__.py": "exit('no\\ndevice')"}, r"cannot be imported: SystemExit: no device; repair"),
        (
            {"more/__init__.py": "", "more/check_pages.py": "def test_pages(): pass\n"},
            r"add nothing: there is no test_\*\.py in .*more, and .* none of the fixtures streams, break_next_commit",
        ),
    ],
    ids=["module", "missing", "import", "exit", "empty"],
)
def test_additions_that_add_nothing_are_one_line_and_exit_code_4(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    site = tmp_path / "site"
    install(site, "some-package", {}, {"cpu": "more"})
    for name, source in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(source)
    ended = run_suite("cpu", folder=tmp_path, site=site)
    assert ended.exit_code == 4, ended.output
    said = refusal(ended.output)
    assert "the additions of backend 'cpu' to the suite (entry point 'more' of some-package 2.5)" in said
    assert re.search(reason, said), said


def test_an_option_that_the_backend_does_not_have_is_refused(tmp_path: Path) -> None:
    ended = run_suite("cpu", "--backend-option", "cpu.speed=9", folder=tmp_path)
    assert ended.exit_code == 4
    assert "cpu.speed" in refusal(ended.output)


def test_the_folders_own_pytest_settings_have_no_say(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = here\npython_files = check_*.py\npython_functions = check_*\naddopts = -q\n"
    )
    (tmp_path / "conftest.py").write_text("raise RuntimeError('this conftest was read')\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "check_this.py").write_text("def test_of_the_folder(): assert False\n")
    ended = run_suite("cpu", *ONE_TEST, folder=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "1 passed" in ended.output


def test_a_run_leaves_nothing_in_its_folder(tmp_path: Path) -> None:
    ended = run_suite("cpu", "-k", f"{ANY_ORDER} or zero_slots", folder=tmp_path)
    assert "2 passed" in ended.output
    assert not list(tmp_path.iterdir())


def test_who_asks_for_the_tests_that_failed_last_gets_them(tmp_path: Path) -> None:
    install_broken(tmp_path / "site")
    for outcome in ("1 failed, 2 passed", "rerun previous 1 failure"):
        ended = run_suite(
            "seed_repeats",
            *("--lf", "-k", "test_no_seed_is_named_twice and 5 or test_nothing_hot or test_zero_slots_asked_for"),
            folder=tmp_path,
            site=tmp_path / "site",
        )
        assert outcome in ended.output, ended.output


def test_a_test_is_named_with_its_file(tmp_path: Path) -> None:
    ended = run_suite("metal_compat", "-v", "-k", "test_zero_slots or test_a_slot_has_whole_pages", folder=tmp_path)
    assert "\ntest_budgets.py::test_zero_slots_asked_for_are_zero_slots PASSED" in ended.output
    assert "\ntest_pages.py::test_a_slot_has_whole_pages_for_itself[small] PASSED" in ended.output


def test_a_device_too_small_for_large_stores_skips_with_the_numbers(tmp_path: Path) -> None:
    install_broken(tmp_path / "site")
    test = "test_eight_fillers_at_once_lose_no_commit"
    ended = run_suite("sound_on_a_small_device", "-k", test, folder=tmp_path, site=tmp_path / "site")
    assert "1 passed, 1 skipped" in ended.output
    reason = "grants 2 of the 16 slots of 3461120 bytes that this test needs: 2 slots fit into 8388608 bytes"
    assert reason in ended.output


def test_what_fails_once_is_shown_as_it_was_with_what_repeats_it(tmp_path: Path) -> None:
    install_broken(tmp_path / "site")
    run = partial(run_suite, "copies_lost_until_missed", "-k", ANY_ORDER, folder=tmp_path, site=tmp_path / "site")
    first = run()
    assert first.exit_code == 1
    assert "Flaky" not in first.output
    steps = re.findall(r"^E +(state\.\w+\(.*\))$", first.output, re.MULTILINE)
    assert steps[-1] == "state.teardown()", first.output
    assert re.search(
        r"^E +assert not .slot \d is not expert \d+ of layer \d: \d+ of 12288 bytes are wrong, the first at ",
        first.output,
        re.MULTILINE,
    )
    (seed,) = re.findall(r"^--random-seed (\d+)$", first.output, re.MULTILINE)
    assert re.findall(r"^E +(state\.\w+\(.*\))$", run("--random-seed", seed).output, re.MULTILINE) == steps


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
    ended = run_suite("cpu", "-k", "test_a_commit_that_failed_says_so", folder=tmp_path)
    reason = "the additions of backend 'cpu' have no fixture break_next_commit, so no commit can fail"
    assert f"\n1 skipped: {reason}\n" in ended.output, ended.output
