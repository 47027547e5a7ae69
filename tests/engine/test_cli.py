"""The command line, called in this process: what it prints where, and how it ends."""

from __future__ import annotations

import errno
import inspect
import json
import mmap
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
from typer.testing import CliRunner, Result

from checkpoint_files import write_checkpoint
from expertstream import policy_names
from expertstream_engine import BUNDLED_MODEL, RunSettings, SamplingSettings
from expertstream_engine.cli.commands import app
from expertstream_engine.cli.plan import plan
from expertstream_engine.cli.run import run
from expertstream_engine.settings import COMMAND_LINE_ONLY

PROMPT = ("-p", "In the beginning God created")
COUNTERS = {
    *("steps", "hits", "misses", "host_hits", "expert_bytes_read", "exhausted", "h2d_bytes", "d2h_bytes"),
    "disk_wait_s",
}


@pytest.fixture(autouse=True)
def nothing_set_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("EXPERTSTREAM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    yield
    structlog.reset_defaults()


def call(*arguments: str | Path, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def json_of(*arguments: str | Path, stdin: str = "") -> Any:
    result = call(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refusal(*arguments: str | Path, stdin: str = "") -> str:
    """The message of a command that ends with exit code 2, nothing on stdout and no traceback."""
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def ran() -> Any:
    return json_of("run", *PROMPT, "-n", "12", "--expert-memory", "25%")


class TestRun:
    def test_json_has_everything_it_promises_in_plain_types(self, ran: Any) -> None:
        assert set(ran) >= {
            *("prompt_tokens", "tokens", "text", "backend", "policy", "io_mode", "slots", "expert_memory_bytes"),
            *("resident_bytes", "hits", "misses", "hit_rate", "expert_bytes_read", "prefill_seconds"),
            *("decode_seconds", "decode_tokens_per_second", "peak_rss_bytes", "prefill", "decode"),
            *("device_hits", "host_hits", "h2d_bytes", "device_bytes", "pinned_bytes", "host_slots", "host_tiering"),
        }
        assert set(ran["prefill"]) == set(ran["decode"]) == COUNTERS | {"hit_rate"}
        assert ran["seed"] is None
        assert len(ran["tokens"]) == 12
        assert (ran["backend"], ran["policy"]) == ("cpu", "hotness")

    def test_the_phases_add_up_to_the_whole(self, ran: Any) -> None:
        for counter in ("hits", "misses", "expert_bytes_read"):
            assert ran[counter] == ran["prefill"][counter] + ran["decode"][counter]
        assert ran["hit_rate"] == ran["hits"] / (ran["hits"] + ran["misses"])
        assert ran["decode"]["steps"] == 4 * 11, "the first token comes out of the prefill"
        assert ran["decode"]["hits"] + ran["decode"]["misses"] == 4 * 2 * 11

    def test_stdout_holds_the_text_and_nothing_else(self, ran: Any) -> None:
        result = call("run", *PROMPT, "-n", "12", "--expert-memory", "all")
        assert result.stdout.removesuffix("\n") == ran["text"].removesuffix("\n"), "memory changes no text"
        assert result.stdout.endswith("\n")

    @pytest.mark.parametrize(
        ("expert_memory", "sentence"), [("25%", "Streaming was on"), ("all", "Streaming was off: every expert")]
    )
    def test_the_report_says_whether_streaming_was_on(self, expert_memory: str, sentence: str) -> None:
        result = call("run", *PROMPT, "-n", "2", "--expert-memory", expert_memory)
        assert sentence in result.stderr
        for word in ("prefill", "decode", "hit rate", "tokens/s", "for 64 experts", "peak memory", "reads "):
            assert word in result.stderr
        assert "s were spent waiting for the file" in result.stderr
        assert "device memory" not in result.stderr, "the slots are the host's"

    def test_without_model_and_prompt_it_runs_the_bundled_model_and_says_so(self) -> None:
        result = call("run", "-n", "1")
        assert result.exit_code == 0
        assert "model: the bundled one" in result.stderr
        assert "prompt: 'The LORD is my shepherd;'" in result.stderr

    def test_the_prompt_may_come_from_standard_input_without_its_last_newline(self, ran: Any) -> None:
        assert json_of("run", "-n", "1", stdin=PROMPT[1] + "\n")["prompt_tokens"] == ran["prompt_tokens"]

    def test_token_ids_are_taken_as_they_are(self, ran: Any) -> None:
        ids = ran["prompt_tokens"]
        again = json_of("run", "--token-ids", ", ".join(map(str, ids)), "-n", "12")
        assert again["prompt_tokens"] == ids
        assert again["tokens"] == ran["tokens"]
        assert json_of("run", "--token-ids", "5", "-n", "1")["prompt_tokens"] == [5]

    def test_a_seed_repeats_a_draw(self) -> None:
        options = ("run", *PROMPT, "-n", "8", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.9")
        first = json_of(*options)
        assert json_of(*options, "--seed", str(first["seed"]))["tokens"] == first["tokens"]

    def test_only_the_default_of_n_gives_way_to_the_context(self) -> None:
        result = call("run", "--token-ids", "1,2,3", "--context", "16", "--json")
        assert len(json.loads(result.stdout)["tokens"]) <= 13
        assert "at most 13 tokens" in result.stderr
        assert "3 tokens and 14" in refusal("run", "--token-ids", "1,2,3", "--context", "16", "-n", "14")
        assert "16 tokens and 1 " in refusal("run", "--token-ids", ",".join("1" * 16), "--context", "16")

    def test_options_go_before_variables_and_variables_before_the_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "settings.toml"
        file.write_text('policy = "lru"\ncontext = 64\nio_mode = "buffered"\n')
        monkeypatch.setenv("EXPERTSTREAM_CONTEXT", "48")
        planned = json_of("plan", BUNDLED_MODEL, "--config", file)
        assert (planned["policy"], planned["demand"]["context_tokens"]) == ("lru", 48)
        ran = json_of("run", *PROMPT, "-n", "1", "--config", file, "--policy", "hotness")
        assert (ran["policy"], ran["io_mode"]) == ("hotness", "buffered")

    def test_verbose_logs_what_was_allocated_on_stderr(self) -> None:
        result = call("run", *PROMPT, "-n", "1", "--json", "--verbose")
        assert "slot_store_allocated" in result.stderr
        assert "slot_store_allocated" not in result.stdout
        assert "slot_store_allocated" not in call("run", *PROMPT, "-n", "1").stderr

    def test_a_model_without_a_known_tokenizer_runs_on_token_ids(self, tmp_path: Path, ran: Any) -> None:
        strange = tmp_path / "strange.gguf"
        # A value of equal length keeps every offset.
        strange.write_bytes(BUNDLED_MODEL.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.modal"))
        ids = ",".join(map(str, ran["prompt_tokens"]))
        result = call("run", strange, "--token-ids", ids, "-n", "12")
        assert [int(word) for word in result.stdout.split()] == ran["tokens"]
        assert "tokenizer.ggml.model" in result.stderr
        assert json_of("run", strange, "--token-ids", ids, "-n", "1")["text"] is None
        assert "token ids" in refusal("run", strange, *PROMPT)


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "fragments"),
        [
            (["no-such.gguf"], ["no-such.gguf"]),
            (["."], ["no GGUF file in this folder"]),
            (["--expert-memory", "8 gigs"], ["option --expert-memory", "8 gigs", "GiB"]),
            (["--expert-memory", "101%"], ["101%"]),
            (["--backend", "cpuu"], ["cpuu", "did you mean 'cpu'"]),
            (["--policy", "hotnes"], ["hotnes", "did you mean 'hotness'"]),
            (["--io-mode", "mmap"], ["option --io-mode", "mmap", "buffered"]),
            (["--threads", "0"], ["option --threads: 0 is not a whole number from 1 to 256\n"]),
            (["--filler-threads", "1000"], ["option --filler-threads: 1000 is not a whole number from 1 to 64\n"]),
            (["--context", "0"], ["option --context: 0 is not a whole number from 1 up\n"]),
            (["--expert-memory", "8"], ["did you mean 8GiB?"]),
            (["--context", "100000"], ["100000", "512"]),
            (["-n", "0"], ["at least 1"]),
            (["-n", "600"], ["600", "512; ask for fewer tokens: the model was trained for no more\n"]),
            (["-n", "60", "--context", "32"], ["or a larger context, up to the 512 "]),
            (["--temperature", "-1"], ["temperature is -1"]),
            (["--top-p", "1.5"], ["top_p is 1.5"]),
            (["--config", "no-such.toml"], ["no-such.toml"]),
        ],
    )
    def test_bad_options_are_named(
        self, arguments: list[str], fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        message = refusal("run", *PROMPT, *arguments)
        assert "error: " in message
        for fragment in fragments:
            assert fragment in message

    @pytest.mark.parametrize(
        ("arguments", "fragment"),
        [
            (["--token-ids", "1,x"], "'x' in --token-ids"),
            (["--token-ids", ""], "'' in --token-ids"),
            (["--token-ids", "1,-5,99999"], "[-5, 99999]"),
            (["--token-ids", "1", "-p", "a"], "one of them"),
            (["-p", "\udcff"], "not UTF-8"),
        ],
    )
    def test_bad_prompts_are_named(self, arguments: list[str], fragment: str) -> None:
        assert fragment in refusal("run", *arguments)

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            (["run", ""], "'MODEL'"),
            (["plan", ""], "'MODEL'"),
            (["inspect", ""], "'MODEL'"),
            (["run", "--hotlist", ""], "'--hotlist'"),
            (["run", "--save-hotlist="], "'--save-hotlist'"),
            (["run", "--config", ""], "'--config'"),
            (["plan", "--config", ""], "'--config'"),
            (["backends", "--config", ""], "'--config'"),
        ],
    )
    def test_an_empty_path_is_not_this_folder(
        self, arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "model.gguf").symlink_to(BUNDLED_MODEL)
        assert f"{name}: it is empty" in refusal(*arguments)

    def test_another_model_needs_a_prompt(self) -> None:
        assert "no prompt: give -p TEXT" in refusal("run", BUNDLED_MODEL)

    def test_the_smallest_budget_is_told_and_works(self) -> None:
        message = refusal("run", *PROMPT, "--expert-memory", "1KiB")
        typed, smallest = re.findall(r"Ask for (\w+) \((\d+) bytes\) or more", message)[0]
        for sufficient in (typed, smallest):
            ran = json_of("run", *PROMPT, "-n", "2", "--expert-memory", sufficient)
            assert ran["expert_memory_bytes"] == int(smallest)
        refusal("run", *PROMPT, "--expert-memory", str(int(smallest) - 1))
        assert json_of("inspect", BUNDLED_MODEL)["smallest_expert_memory_bytes"] == int(smallest)

    def test_a_cut_or_foreign_or_dense_file_is_named(self, tmp_path: Path) -> None:
        cut, text = tmp_path / "cut.gguf", tmp_path / "text.gguf"
        cut.write_bytes(BUNDLED_MODEL.read_bytes()[:-4096])
        text.write_text("# a model card")
        dense = write_checkpoint(tmp_path / "dense.gguf", [{}, {}]).path
        for file in (cut, text, dense):
            for command in ("run", "plan", "inspect"):
                prompt = PROMPT if command == "run" else ()
                assert file.name in refusal(command, file, *prompt)

    def test_an_unknown_key_of_the_file_is_named_with_its_line(self, tmp_path: Path) -> None:
        file = tmp_path / "settings.toml"
        file.write_text('\nexpert_memoy = "1GiB"\n')
        message = refusal("plan", BUNDLED_MODEL, "--config", file)
        assert "line 2" in message
        assert "did you mean 'expert_memory'" in message

    def test_what_only_the_command_line_takes_is_no_unknown_setting(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "settings.toml"
        file.write_text("temperature = 0.7\n")
        monkeypatch.setenv("EXPERTSTREAM_MAX_TOKENS", "3")
        message = refusal("run", *PROMPT, "--config", file)
        assert "line 1 is no setting; temperature can only be given as an option" in message
        assert "EXPERTSTREAM_MAX_TOKENS is no setting; max_tokens can only be given as an option" in message

    def test_what_matters_to_draws_alone_is_said_to_change_nothing_at_temperature_0(self) -> None:
        plain = call("run", *PROMPT, "-n", "2", "--expert-memory", "25%")
        unused = call("run", *PROMPT, "-n", "2", "--expert-memory", "25%", "--seed", "4", "--top-k", "3")
        assert unused.stdout == plain.stdout
        assert "note: --top-k and --seed change nothing at temperature 0" in unused.stderr
        assert "change nothing" not in plain.stderr
        drawn = call("run", *PROMPT, "-n", "2", "--seed", "4", "--top-k", "3", "--temperature", "1")
        assert "change nothing" not in drawn.stderr

    def test_every_option_is_a_setting_or_known_to_be_none(self) -> None:
        options = {name for name in inspect.signature(run).parameters if name not in ("config", "as_json")}
        settings = {attribute.name for attribute in attrs.fields(RunSettings)} | {"backend_option"}
        assert options - settings <= COMMAND_LINE_ONLY
        assert settings - options == {"backends"}  # the tables of backends' options, which backend_option fills
        assert not settings & COMMAND_LINE_ONLY
        assert set(inspect.signature(plan).parameters) <= set(inspect.signature(run).parameters)

    def test_an_import_that_fails_is_said_without_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "expertstream"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "numpy", None)
        result = call("plan", BUNDLED_MODEL)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: unexpected ModuleNotFoundError: import of numpy halted")

    def test_a_device_without_memory_is_told_of_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refusing(*_: object, **__: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        of_the_backend = types.SimpleNamespace(**vars(mmap) | {"mmap": refusing})  # the filler gets its pages
        monkeypatch.setattr("expertstream_cpu.mmap", of_the_backend)
        result = call("run", *PROMPT, "-n", "1", "--expert-memory", "25%")
        assert result.exit_code == 2
        assert result.stderr.count("Cannot allocate memory") == 1

    def test_memory_that_cannot_be_had_is_no_defect_of_this_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from expertstream_engine.model import MoeModel

        def refusing(*_: object, **__: object) -> None:
            raise MemoryError("Unable to allocate 1.00 MiB for an array")

        monkeypatch.setattr(MoeModel, "__init__", refusing)
        result = call("run", *PROMPT, "-n", "1")
        assert result.exit_code == 2
        assert "error: memory cannot be had: Unable to allocate 1.00 MiB" in result.stderr
        assert "ulimit -v" in result.stderr

    def test_a_plan_that_does_not_fit_shows_the_sum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from expertstream import AvailableMemory
        from expertstream_engine import demand

        monkeypatch.setattr(demand, "available_memory", lambda: AvailableMemory(1 << 20, "a test says so", 1 << 20))
        message = refusal("plan", BUNDLED_MODEL)
        assert "resident weights" in message
        assert "a test says so" in message

    def test_a_traceback_comes_only_when_asked_for(self) -> None:
        result = call("plan", "no-such.gguf", "--debug")
        assert result.exit_code == 2
        assert "Traceback" in result.stderr

    def test_what_nobody_foresaw_is_said_with_its_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from expertstream_engine import demand

        def broken(*_: object) -> None:
            raise ZeroDivisionError("oh")

        monkeypatch.setattr(demand, "plan_run", broken)
        result = call("plan", BUNDLED_MODEL)
        assert result.exit_code == 1
        assert result.stderr == "error: unexpected ZeroDivisionError: oh: run again with --debug for the traceback\n"

    def test_storage_that_fails_is_not_the_users_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from expertstream import ReadFailed
        from expertstream_engine import session

        def failing(*_: object, **__: object) -> None:
            raise ReadFailed("model.gguf: 4096 bytes at 8192: Input/output error")

        monkeypatch.setattr(session, "load_resident", failing)
        result = call("run", *PROMPT, "-n", "1")
        assert result.exit_code == 1
        assert "error: model.gguf: 4096 bytes at 8192" in result.stderr
        assert result.stdout == ""

    @pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system asks for direct reads in another way")
    def test_direct_reads_that_the_storage_does_not_allow_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_open = os.open

        def without_direct_reads(path: Any, flags: int, *more: Any, **options: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return real_open(path, flags, *more, **options)

        monkeypatch.setattr(os, "open", without_direct_reads)
        monkeypatch.setenv("EXPERTSTREAM_IO_MODE", "direct")
        for arguments in (("run", *PROMPT), ("plan",)):
            assert "does not allow them" in refusal(*arguments)

    @pytest.mark.parametrize("passes", [0, 2])
    def test_a_device_that_fails_on_the_way_ends_the_run_with_what_was_done(
        self, passes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from expertstream import MachineError
        from expertstream_engine.session import Model

        real_forward, done = Model._forward, []

        def failing(model: Model, *arguments: Any, **options: Any) -> Any:
            if len(done) == passes:
                error = MachineError("the device failed")
                error.add_note("while it computed")
                raise error
            done.append(1)
            return real_forward(model, *arguments, **options)

        monkeypatch.setattr(Model, "_forward", failing)
        result = call("run", *PROMPT, "-n", "8")
        assert result.exit_code == 2
        assert f"{passes} tokens generated, ended by failure" in result.stderr
        assert result.stderr.endswith("error: the device failed\nwhile it computed\n")


class TestInspect:
    def test_sizes_are_those_of_the_file(self, tmp_path: Path) -> None:
        record = json_of("inspect", write_checkpoint(tmp_path / "mixed.gguf").path)
        assert record["experts_per_token"] == 2
        assert record["expert_count"] == 4 * 8
        assert [layer["expert_bytes"] for layer in record["layers"]] == [55296, 55296, 55296, 110592]
        assert record["routed_bytes"] == 8 * (3 * 55296 + 110592)
        assert [group["layers"] for group in record["size_classes"]] == [[0, 1, 2], [3]]
        assert record["layers"][3]["quantization"] == {"gate": "Q4_K", "up": "Q4_K", "down": "Q4_K"}

    def test_a_model_that_cannot_be_run_is_shown_with_the_reason(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path / "foreign.gguf").path
        record = json_of("inspect", path)
        assert "testmoe" in record["cannot_run_because"]
        assert "tokenizer.ggml.model" in record["no_text_because"]
        shown = call("inspect", path).stdout
        assert "no: " in shown
        assert "0-2" in shown

    def test_the_bundled_model_runs_and_has_text(self) -> None:
        record = json_of("inspect", BUNDLED_MODEL)
        assert record["cannot_run_because"] is None
        assert record["no_text_because"] is None
        assert record["architecture"] == "qwen3moe"
        lines = call("inspect", BUNDLED_MODEL).stdout.splitlines()
        assert lines[0] == f"file{' ' * 20}{BUNDLED_MODEL}", "no line for a pipe is wrapped or padded"
        assert not any(line.endswith(" ") for line in lines)

    def test_without_a_model_it_is_the_bundled_one(self) -> None:
        for command in ("inspect", "plan"):
            result = call(command)
            assert result.exit_code == 0
            assert "model: the bundled one" in result.stderr
            assert "slot" in result.stdout


class TestPlan:
    def test_a_run_takes_what_the_plan_says(self, ran: Any) -> None:
        planned = json_of("plan", BUNDLED_MODEL, "--expert-memory", "25%")
        assert planned["expert_memory_bytes"] == ran["expert_memory_bytes"]
        assert planned["demand"]["resident_bytes"] == ran["resident_bytes"]
        assert sum(group["slot_count"] for group in planned["classes"]) == ran["slots"]

    def test_the_table_has_every_addend(self) -> None:
        shown = call("plan", BUNDLED_MODEL, "--context", "100").stdout
        for row in (
            "resident weights",
            "KV cache of 100 tokens",
            "workspace",
            "slots for layers",
            "total",
            "available",
        ):
            assert row in shown

    @pytest.mark.parametrize("backend", ["cpu", "metal_compat", "fakedevice"])
    def test_it_allocates_no_slots(self, backend: str) -> None:
        result = call("plan", BUNDLED_MODEL, "--backend", backend, "--verbose")
        assert result.exit_code == 0, result.stderr
        assert "slots_granted" in result.stderr
        assert "slot_store" not in result.stderr

    def test_what_python_itself_takes_is_told_beside_the_total(self) -> None:
        planned = json_of("plan", BUNDLED_MODEL)
        assert planned["interpreter_bytes"] > 1 << 20
        assert "Python and its libraries         about " in call("plan", BUNDLED_MODEL).stdout

    def test_why_a_quarter_is_less_than_a_quarter_of_the_slots_is_shown(self) -> None:
        shown = call("plan", BUNDLED_MODEL, "--expert-memory", "25%").stdout
        assert "(122880 bytes), in whole pages, for an expert of 110592 bytes\n" in shown


def test_backends_lists_the_installed_ones() -> None:
    (cpu,) = [record for record in json_of("backends") if record["name"] == "cpu"]
    assert cpu["usable"] is True
    assert cpu["host_memory_is_device_addressable"] is True
    assert cpu["distribution"] == "expertstream"
    assert "in place" in call("backends").stdout


def test_the_version_is_that_of_the_distribution() -> None:
    assert re.fullmatch(r"expertstream \d+\.\d+\.\d+\S*\n", call("--version").stdout)


def test_every_setting_that_help_calls_a_default_is_the_default() -> None:
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", call("run", "--help").stdout).split())
    defaults = {attribute.name: attribute.default for attribute in attrs.fields(RunSettings)}
    assert defaults["half_life_tokens"] is None, "the policy's own"
    assert "By default 16." in shown
    for name in ("backend", "policy", "filler_threads", "io_mode"):
        assert f"By default {defaults[name]}" in shown, name
    sampling = {attribute.name: attribute.default for attribute in attrs.fields(SamplingSettings)}
    for name, is_off in (("temperature", ":"), ("top_k", ","), ("top_p", ","), ("min_p", ","), ("repeat_penalty", ",")):
        assert f"By default {sampling[name]:g}{is_off}" in shown, name
    assert "<bool>" not in shown.replace("--help <bool>", ""), "a flag takes no value"
    for name in policy_names():
        assert name in shown
