"""The CUDA backends on a machine that cannot run them: they say why, and stand in nobody's way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import structlog
from typer.testing import CliRunner

import expertstream_cuda_unified
from expertstream import (
    AvailableMemory,
    BackendUnavailable,
    Checkpoint,
    Demand,
    DoesNotFit,
    ExpertLayer,
    ExpertPart,
    MachineError,
    MemoryRequest,
    Plan,
    make_plan,
    open_backend,
    probe_backends,
)
from expertstream.config import BackendOption
from expertstream_cuda import device as device_module
from expertstream_cuda_unified import HEADROOM_PERCENT, one_pool_budget
from expertstream_engine.cli.commands import app

GIB = 1 << 30


class FakeError(Exception):
    """What CuPy's runtime raises."""

    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class FakeRuntime:
    """A CUDA runtime that counts devices as it is told, or raises."""

    CUDARuntimeError = FakeError

    def __init__(self, count: int | FakeError, driver: int = 13000, attributes: int = 1) -> None:
        self.count, self.driver, self.attributes = count, driver, attributes
        self.free, self.total = 100 * GIB, 80 * GIB
        self.lacking: set[str] = set()  # attributes
        self.failing: dict[str, int] = {}  # calls, with the status that they fail with

    def __getattr__(self, name: str) -> str:
        if name.startswith("cudaDevAttr"):
            return name.removeprefix("cudaDevAttr")
        raise AttributeError(name)

    def getDeviceCount(self) -> int:
        if isinstance(self.count, FakeError):
            raise self.count
        return self.count

    def getDeviceProperties(self, number: int) -> dict[str, bytes]:
        return {"name": b"Fake GPU", "uuid": bytes([number] * 16)}

    def deviceGetAttribute(self, name: str, number: int) -> int:
        self.fail("deviceGetAttribute")
        return 0 if name in self.lacking else self.attributes

    def driverGetVersion(self) -> int:
        return self.driver

    def runtimeGetVersion(self) -> int:
        return 13000

    def setDevice(self, number: int) -> None:
        self.fail("setDevice")
        self.current = number

    def memGetInfo(self) -> tuple[int, int]:
        self.fail("memGetInfo")
        return self.free, self.total

    def fail(self, call: str) -> None:
        if call in self.failing:
            raise FakeError(self.failing[call])


@pytest.fixture(autouse=True)
def _no_memory_of_what_was_found() -> Iterator[None]:
    for found in (device_module._runtime, device_module.open_device):
        found.cache_clear()
    yield
    for found in (device_module._runtime, device_module.open_device):
        found.cache_clear()
    structlog.reset_defaults()  # commands configure it


def install(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, nvrtc_error: Exception | None = None) -> None:
    """A CuPy over that runtime, with an NVRTC that tells its version or raises."""
    cuda = types.ModuleType("cupy.cuda")
    nvrtc = MagicMock()
    nvrtc.getVersion.configure_mock(return_value=(13, 0), side_effect=nvrtc_error)
    vars(cuda).update(runtime=runtime, nvrtc=nvrtc)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


@pytest.mark.parametrize("name", ["cuda_discrete", "cuda_unified"])
@pytest.mark.parametrize(
    ("runtime", "why"),
    [
        (FakeRuntime(FakeError(35), driver=0), "no CUDA driver is installed here"),
        (FakeRuntime(FakeError(35), driver=12040), r"driver is for CUDA 12\.4, older than CUDA 13\.0"),
        (FakeRuntime(FakeError(100)), "finds no device"),
        (FakeRuntime(0), "finds no device"),
        (FakeRuntime(FakeError(999)), "the CUDA driver answers: error 999"),
    ],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, name: str, runtime: FakeRuntime, why: str) -> None:
    install(monkeypatch, runtime)
    with pytest.raises(BackendUnavailable, match=why):
        open_backend(name)
    problems = {status.offer.name: status.problem for status in probe_backends()}
    assert problems["cpu"] is None
    assert problems[name] is not None
    for command in (["plan"], ["run", "--token-ids", "1"]):
        refused = CliRunner().invoke(app, [*command, "--backend", name])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert re.search(f"^error: .*{why}", refused.stderr, re.MULTILINE)


def test_hidden_devices_are_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeRuntime(FakeError(100)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BackendUnavailable, match="CUDA_VISIBLE_DEVICES is ''"):
        open_backend("cuda_discrete")


@pytest.mark.parametrize("error", [ImportError("no libcudart"), OSError("cannot be opened"), RuntimeError("odd")])
def test_a_cupy_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        """Finds CuPy, and fails while importing it."""

        def find_spec(self, name: str, *_: object) -> None:
            if name.split(".")[0] == "cupy":
                raise error

    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(BackendUnavailable, match=rf"CuPy cannot be imported \({type(error).__name__}.*cuda13"):
        open_backend("cuda_discrete")


@pytest.mark.parametrize("command", [["plan"], ["run", "-p", "a"]])
@pytest.mark.parametrize("name", ["cuda_discrete", "cuda_unified"])
def test_a_cupy_without_a_compiler_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, name: str, command: list[str]
) -> None:
    runtime = FakeRuntime(1)
    runtime.free = 60 * GIB
    install(monkeypatch, runtime, RuntimeError('Failure finding "libnvrtc.so.13": No such file\n'))
    refused = CliRunner().invoke(app, [*command, "--backend", name])
    assert (refused.exit_code, refused.stdout) == (2, "")
    said = " ".join(refused.stderr.split())
    assert '(RuntimeError: Failure finding "libnvrtc.so.13": No such file)' in said
    assert f"backend '{name}'" in said
    assert "pip install 'cupy-cuda13x[ctk]', or 'cupy-cuda12x[ctk]'" in said
    assert "install a CUDA toolkit" in said


def test_free_memory_that_cannot_be_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeRuntime(1))
    with pytest.raises(MachineError, match="which cannot be"):
        open_backend("cuda_discrete")


@pytest.mark.parametrize(
    ("name", "call", "status"),
    [
        ("cuda_discrete", "setDevice", 46),  # cudaErrorDevicesUnavailable: busy, or another process's alone
        ("cuda_discrete", "memGetInfo", 2),  # cudaErrorMemoryAllocation: none is left for a context
        ("cuda_unified", "setDevice", 46),
        ("cuda_unified", "memGetInfo", 2),
        ("cuda_unified", "deviceGetAttribute", 999),
    ],
)
def test_a_device_that_is_counted_and_cannot_be_opened_gives_the_next_backend_its_turn(
    monkeypatch: pytest.MonkeyPatch, name: str, call: str, status: int
) -> None:
    runtime = FakeRuntime(1)
    runtime.free, runtime.failing = 60 * GIB, {call: status}
    install(monkeypatch, runtime)
    why = f"CUDA device 0 (Fake GPU) is there and cannot be opened: error {status}; nvidia-smi shows which"
    with pytest.raises(BackendUnavailable, match=re.escape(why)) as refusal:
        open_backend(name)
    assert "choose another device by the option `device`, or another backend" in str(refusal.value)
    problems = {listed.offer.name: listed.problem for listed in probe_backends()}
    assert problems[name] == str(refusal.value)
    planned = CliRunner().invoke(app, ["plan", "--json", "--backend", f"{name},cpu"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["backend"] == "cpu"
    assert why in planned.stderr
    refused = CliRunner().invoke(app, ["plan", "--backend", name])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert why in refused.stderr
    runtime.failing = {}
    assert open_backend(name).name == name, "what failed once is asked again"


def test_a_device_that_cannot_read_host_memory_is_refused_by_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeRuntime(1, attributes=0))
    with pytest.raises(BackendUnavailable, match=r"PageableMemoryAccess .*mapped = true"):
        open_backend("cuda_unified")


@pytest.mark.parametrize(
    ("lacking", "mapped", "sentence"),
    [
        (["PageableMemoryAccess"], False, "attribute PageableMemoryAccess is 0; mapped = true"),
        (
            ["PageableMemoryAccess", "PageableMemoryAccessUsesHostPageTables"],
            False,
            "attributes PageableMemoryAccess and PageableMemoryAccessUsesHostPageTables are 0; mapped = true",
        ),
        (
            ["CanUseHostPointerForRegisteredMem", "HostRegisterSupported", "UnifiedAddressing"],
            True,
            "attributes UnifiedAddressing, HostRegisterSupported and CanUseHostPointerForRegisteredMem are 0$",
        ),
    ],
)
def test_one_attribute_or_several_are_named_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, lacking: list[str], mapped: bool, sentence: str
) -> None:
    runtime = FakeRuntime(1)
    runtime.lacking = set(lacking)
    install(monkeypatch, runtime)
    with pytest.raises(BackendUnavailable, match=f"Fake GPU cannot read host memory in place: the driver's {sentence}"):
        open_backend("cuda_unified", options=[BackendOption("cuda_unified", "mapped", mapped)])


def test_a_device_that_reads_host_memory_is_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeRuntime(1))
    assert open_backend("cuda_unified").host_memory_is_device_addressable() is True


@pytest.mark.parametrize(
    ("name", "options"),
    [("cuda_discrete", {}), ("cuda_unified", {}), ("cuda_unified", {"mapped": True})],
)
def test_slots_are_described_as_the_memory_that_cupy_takes_them_for(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, object]
) -> None:
    runtime = FakeRuntime(1)
    runtime.free = 60 * GIB
    install(monkeypatch, runtime)
    backend = open_backend(name, options=[BackendOption(name, key, value) for key, value in options.items()])
    assert backend.describe_device().dlpack_type == 2  # kDLCUDA: dlpack.h


def test_a_warning_says_what_reading_across_the_bus_costs_in_figures_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime(1)
    runtime.free = runtime.total
    install(monkeypatch, runtime)
    mapped = ["--backend", "cuda_unified", "--backend-option", "cuda_unified.mapped=true"]
    shown = CliRunner().invoke(app, ["plan", *mapped])
    assert shown.exit_code == 0, shown.output
    (line,) = [line for line in shown.stderr.splitlines() if "slots_read_across_the_bus" in line]
    assert "every use of an expert moves all its bytes across the bus" in line
    assert "cuda_discrete" in line
    slow, fast, plain = map(int, re.findall(r"(\d+) to (\d+) GB/s in copies across it against (\d+)", line)[0])
    measured = json.loads((Path(__file__).parents[2] / "bench" / "results" / "gpu-h200.json").read_text())
    copies = [result["plain"][1] for result in measured["copies"]["results"]]
    reads = [result["gb_per_s"] / result["of_read"] for result in measured["kernels"]["results"]]
    assert slow <= min(copies) <= max(copies) <= fast
    assert 0.98 * min(reads) <= plain <= max(reads)


@pytest.mark.parametrize("choice", [[], ["--backend-option", "cuda_unified.device=1"]])
def test_a_user_is_told_once_which_of_several_devices_is_used_and_how_to_choose(
    monkeypatch: pytest.MonkeyPatch, choice: list[str]
) -> None:
    install(monkeypatch, FakeRuntime(2))
    shown = CliRunner().invoke(app, ["plan", "--backend", "cuda_unified", *choice])
    assert shown.exit_code == 0, shown.output
    (line,) = [line for line in shown.stderr.splitlines() if "cuda_device_chosen" in line]
    used, unused = (1, 0) if choice else (0, 1)
    identity = uuid.UUID(bytes=bytes([unused] * 16))
    assert f"device={used} " in line
    assert "of=2" in line
    assert f"unused='{unused} (Fake GPU, GPU-{identity})'" in line
    assert "choose_by='--backend-option BACKEND.device=NUMBER, or =UUID'" in line
    again = CliRunner().invoke(app, ["plan", "--backend", "cuda_unified", *choice])
    assert "cuda_device_chosen" not in again.stderr


@pytest.mark.parametrize("name", ["cuda_discrete", "cuda_unified"])
def test_a_device_is_chosen_by_its_uuid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    runtime = FakeRuntime(3)
    install(monkeypatch, runtime)
    runtime.free = runtime.total
    second = f"GPU-{uuid.UUID(bytes=bytes([1] * 16))}"
    chosen = CliRunner().invoke(app, ["plan", "--backend", name, "--backend-option", f"{name}.device={second}"])
    assert chosen.exit_code == 0, chosen.stderr
    assert runtime.current == 1
    refused = CliRunner().invoke(app, ["plan", "--backend", name, "--backend-option", f"{name}.device={second[:-1]}"])
    assert refused.exit_code == 2
    assert second in refused.stderr, "all that there are"


def test_mapped_host_memory_leaves_the_rest_to_the_device_which_must_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(1)
    runtime.free = 1 << 20
    install(monkeypatch, runtime)
    mapped = ["--backend", "cuda_unified", "--backend-option", "cuda_unified.mapped=true"]
    for command in (["plan"], ["run", "--token-ids", "1"]):
        refused = CliRunner().invoke(app, [*command, *mapped])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert re.search(r"Fake GPU holds what lies beside the slots, \d+ bytes, and has 1048576 free", refused.stderr)
    runtime.free = runtime.total
    assert CliRunner().invoke(app, ["plan", *mapped]).exit_code == 0


def test_one_device_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeRuntime(1))
    shown = CliRunner().invoke(app, ["plan", "--backend", "cuda_unified", "--verbose"])
    assert shown.exit_code == 0, shown.output
    assert "cuda_device_chosen" not in shown.stderr


def test_the_cpu_backend_never_loads_cuda() -> None:
    program = (
        "import sys, expertstream; expertstream.open_backend('cpu').describe_device();"
        "sys.exit(any(name.split('.')[0] in ('cupy', 'expertstream_cuda') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_one_pool_leaves_headroom_and_counts_what_is_resident_once() -> None:
    available = AvailableMemory(100 * GIB, "a test", 100 * GIB)
    left = 100 * GIB - 100 * GIB * HEADROOM_PERCENT // 100
    assert one_pool_budget(available, GIB, 0, None).slots == left // GIB
    assert one_pool_budget(available, GIB, 90 * GIB, None).slots == left // GIB - 90
    assert one_pool_budget(available, GIB, 0, 7).slots == 7
    assert one_pool_budget(available, GIB, 200 * GIB, 7).slots == 0


PUBLISHED_POOL_BYTES = round(119.631 * GIB)


def published_case(monkeypatch: pytest.MonkeyPatch, name: str, slots: int | None) -> Plan:
    """The plan of a published checkpoint for the real plugin, with so many slots or, None, with all experts in slots.

    369.96 GiB in files, 335.62 GiB of it experts; 26.01 GiB stay, and 8.33 GiB belong to neither and are not read;
    8,000 slots are 44.56 GiB, an expert whole pages of them. Host and device have 119.631 GiB, which is one pool on the
    unified device.
    """
    slot_bytes = round(44.56 * GIB / 8000) // 4096 * 4096
    expert_count = -(-round(335.62 * GIB) // slot_bytes)
    runtime = FakeRuntime(1)
    runtime.free = runtime.total = PUBLISHED_POOL_BYTES
    install(monkeypatch, runtime)
    available = AvailableMemory(PUBLISHED_POOL_BYTES, "a published machine", PUBLISHED_POOL_BYTES)
    monkeypatch.setattr(expertstream_cuda_unified, "available_memory", lambda: available)
    offsets = np.arange(expert_count, dtype=np.int64) * slot_bytes
    files = np.zeros(expert_count, np.int32)
    part = ExpertPart("gate_up", "F32", (slot_bytes // 4, 1), slot_bytes, files, offsets)
    layer = ExpertLayer(0, expert_count, (part,))
    checkpoint = Checkpoint((Path("published.gguf"),), {}, {}, (layer,), 8, "a published checkpoint", ())
    demand = Demand(
        resident_bytes=-(-2601 * GIB // 100), kv_cache_bytes=0, workspace_bytes=0, context_tokens=0, on_device=True
    )
    request = MemoryRequest.parse("all" if slots is None else str(slots * slot_bytes))
    return make_plan(checkpoint, demand, request, open_backend(name), available)


def test_a_published_case_is_accepted_on_one_pool_with_streaming_and_refused_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = published_case(monkeypatch, "cuda_unified", 8000)
    (planned,) = plan.classes
    assert plan.one_pool
    assert planned.slot_count == 8000
    assert round(planned.total_bytes / GIB, 2) == 44.56
    assert plan.total_bytes == plan.host_bytes == plan.demand.resident_bytes + 8000 * planned.slot_bytes
    assert round(plan.total_bytes / GIB, 2) == 70.57
    with pytest.raises(DoesNotFit, match=r"resident weights: 26\.01 GiB(.|\n)*total: 361\.6"):
        published_case(monkeypatch, "cuda_unified", None)


def test_a_published_case_is_granted_all_of_the_pool_but_the_headroom_to_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = published_case(monkeypatch, "cuda_unified", 8000)
    slot_bytes = plan.classes[0].slot_bytes
    headroom_bytes = PUBLISHED_POOL_BYTES * HEADROOM_PERCENT // 100
    fit = (PUBLISHED_POOL_BYTES - headroom_bytes - plan.demand.resident_bytes) // slot_bytes
    most = published_case(monkeypatch, "cuda_unified", fit)
    assert most.classes[0].slot_count == fit
    assert PUBLISHED_POOL_BYTES - slot_bytes < most.total_bytes + headroom_bytes <= PUBLISHED_POOL_BYTES
    refusal = rf"backend 'cuda_unified' grants {fit} of {fit + 1} slots .* with {headroom_bytes} bytes left free"
    with pytest.raises(DoesNotFit, match=refusal):
        published_case(monkeypatch, "cuda_unified", fit + 1)


def test_a_published_case_is_refused_by_name_on_a_discrete_device_of_that_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = published_case(monkeypatch, "cuda_discrete", 8000)
    assert not plan.one_pool
    assert plan.device_bytes == plan.demand.resident_bytes + 8000 * plan.classes[0].slot_bytes
    refusal = r"backend 'cuda_discrete' grants \d+ of \d+ slots (.|\n)*resident weights: 26\.01 GiB(.|\n)*total: 361"
    with pytest.raises(DoesNotFit, match=refusal):
        published_case(monkeypatch, "cuda_discrete", None)


def test_a_published_case_is_refused_by_attribute_on_a_device_that_host_memory_is_no_store_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime(1, attributes=0)
    runtime.free = runtime.total = PUBLISHED_POOL_BYTES
    install(monkeypatch, runtime)
    with pytest.raises(BackendUnavailable, match=r"cannot read host memory in place: .*PageableMemoryAccess"):
        open_backend("cuda_unified")
