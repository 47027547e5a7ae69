"""The memory and cores this process may take are bounded by the host and by every control group above it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from expertstream.errors import MachineError
from expertstream.machine import AvailableMemory, available_memory, usable_cores

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


class Tree:
    """A root directory with the files of a made-up machine."""

    def __init__(self, root: Path, host_available_bytes: int = 16 * GIB) -> None:
        self.root = root
        self.mounts: list[str] = []
        self.write("proc/meminfo", f"MemTotal:       99999999 kB\nMemAvailable:   {host_available_bytes // 1024} kB\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def member_of(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mount(self, point: str, kind: str, shows: str = "/", options: str = "rw", tags: str = "") -> None:
        number = len(self.mounts) + 30
        self.mounts.append(f"{number} 23 0:{number} {shows} {point} rw,nosuid {tags}- {kind} {kind} {options}\n")
        self.write("proc/self/mountinfo", "".join(["22 1 8:1 / / rw - ext4 /dev/root rw\n", *self.mounts]))

    def v2(self, directory: str, limit: str, used: int, *, high: str = "max", stat: str = "") -> None:
        files = {"memory.max": limit, "memory.high": high, "memory.current": str(used), "memory.stat": stat}
        for name, text in files.items():
            self.write(f"{directory}/{name}", f"{text}\n")

    def v1(self, directory: str, limit: int, used: int, *, stat: str = "") -> None:
        files = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": stat}
        for name, text in files.items():
            self.write(f"{directory}/{name}", f"{text}\n")

    def available(self) -> AvailableMemory:
        return available_memory(self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def unified(tree: Tree) -> Tree:
    """A machine with cgroup v2 alone, as most have, and this process two groups down."""
    tree.member_of("0::/outer/inner")
    tree.mount("/sys/fs/cgroup", "cgroup2", tags="shared:4 ")
    (tree.root / "sys/fs/cgroup/outer/inner").mkdir(parents=True)
    return tree


def test_without_a_limit_the_host_decides(unified: Tree) -> None:
    unified.v2("sys/fs/cgroup/outer/inner", "max", 5 * GIB)
    available = unified.available()
    assert (available.bytes, available.host_available_bytes) == (16 * GIB, 16 * GIB)
    assert (available.limit_bytes, available.limit_path, available.unread) == (None, None, ())
    assert available.reason == f"{unified.root}/proc/meminfo says MemAvailable: {16 * GIB} bytes"


def test_a_limit_counts_less_what_is_in_use(unified: Tree) -> None:
    unified.v2("sys/fs/cgroup/outer/inner", str(2 * GIB), 300_000_001)
    available = unified.available()
    assert available.bytes == 2 * GIB - 300_000_001
    assert available.limit_bytes == 2 * GIB
    assert available.limit_path == unified.root / "sys/fs/cgroup/outer/inner/memory.max"
    assert available.host_available_bytes == 16 * GIB


def test_the_reason_shows_every_number_and_the_file_that_decided(unified: Tree) -> None:
    unified.v2("sys/fs/cgroup/outer/inner", str(2 * GIB), 300_000_001, stat="anon 5\ninactive_file 100\nactive_file 23")
    assert unified.available().reason == (
        f"{unified.root}/sys/fs/cgroup/outer/inner/memory.max allows 2147483648 bytes, and 300000001 are in use, "
        f"of which 123 are file cache that can be reclaimed: 1847483770 left; "
        f"{unified.root}/proc/meminfo says MemAvailable: 17179869184 bytes"
    )


def test_a_limit_on_a_parent_alone_counts(unified: Tree) -> None:
    unified.v2("sys/fs/cgroup/outer/inner", "max", 5)
    unified.v2("sys/fs/cgroup/outer", str(2 * GIB), 77)
    available = unified.available()
    assert available.bytes == 2 * GIB - 77
    assert available.limit_path == unified.root / "sys/fs/cgroup/outer/memory.max"


def test_the_group_with_the_least_room_decides_and_not_the_smallest_limit(unified: Tree) -> None:
    unified.v2("sys/fs/cgroup/outer/inner", str(2 * GIB), GIB)
    unified.v2("sys/fs/cgroup/outer", str(4 * GIB), 4 * GIB - 9)
    assert unified.available().bytes == 9


def test_the_high_mark_counts_where_it_is_lower_than_the_maximum(unified: Tree) -> None:
    unified.v2("sys/fs/cgroup/outer/inner", str(4 * GIB), 7, high=str(2 * GIB))
    available = unified.available()
    assert available.bytes == 2 * GIB - 7
    assert available.limit_path is not None
    assert available.limit_path.name == "memory.high"


def test_a_group_in_excess_of_its_limit_has_nothing_left(unified: Tree) -> None:
    unified.v2("sys/fs/cgroup/outer/inner", str(2 * GIB), 2 * GIB, high=str(GIB))
    assert unified.available().bytes == 0


def test_a_host_with_less_than_the_group_allows_decides(tmp_path: Path) -> None:
    tree = Tree(tmp_path, host_available_bytes=GIB)
    tree.member_of("0::/a")
    tree.mount("/sys/fs/cgroup", "cgroup2")
    tree.v2("sys/fs/cgroup/a", str(2 * GIB), 0)
    available = tree.available()
    assert (available.bytes, available.limit_bytes) == (GIB, 2 * GIB)
    assert available.reason.startswith(f"{tmp_path}/proc/meminfo says MemAvailable: {GIB} bytes; ")
    assert available.reason.endswith("would leave more")


def test_clean_file_cache_does_not_count_as_used_and_dirty_cache_does(unified: Tree) -> None:
    stat = "anon 400\nfile 1000\nshmem 50\nfile_dirty 30\nfile_writeback 3\ninactive_file 600\nactive_file 300\n"
    unified.v2("sys/fs/cgroup/outer/inner", str(2 * GIB), 10_000, stat=stat)
    assert unified.available().bytes == 2 * GIB - (10_000 - (900 - 33))


def test_cache_never_counts_for_more_than_the_use(unified: Tree) -> None:
    """The two files are read one after the other, so they can disagree."""
    unified.v2("sys/fs/cgroup/outer/inner", str(2 * GIB), 100, stat="inactive_file 5000")
    assert unified.available().bytes == 2 * GIB
    unified.v2("sys/fs/cgroup/outer/inner", str(2 * GIB), 100, stat="file_dirty 5000")
    assert unified.available().bytes == 2 * GIB - 100


@pytest.fixture
def hybrid(tree: Tree) -> Tree:
    """A machine whose memory hierarchy is version 1, beside an empty version 2 mount."""
    tree.member_of("5:cpu,cpuacct:/cpu", "4:memory:/outer/inner", "1:name=systemd:/memory", "0::/")
    tree.mount("/sys/fs/cgroup/cpu", "cgroup", options="rw,cpu,cpuacct")
    tree.mount("/sys/fs/cgroup/memory", "cgroup", options="rw,memory")
    tree.mount("/sys/fs/cgroup/unified", "cgroup2")
    (tree.root / "sys/fs/cgroup/unified").mkdir(parents=True)
    for directory in ("", "/outer", "/outer/inner"):
        tree.v1(f"sys/fs/cgroup/memory{directory}", NO_LIMIT_V1, 12345)
    return tree


def test_the_old_interfaces_huge_number_is_no_limit(hybrid: Tree) -> None:
    available = hybrid.available()
    assert (available.bytes, available.limit_bytes, available.unread) == (16 * GIB, None, ())


def test_the_old_interface_counts_parents_and_the_cache_of_the_whole_subtree(hybrid: Tree) -> None:
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 5000\ntotal_active_file 400\ntotal_dirty 60\n"
    hybrid.v1("sys/fs/cgroup/memory/outer", 3 * GIB, 100_000, stat=f"{stat}total_writeback 7\n")
    available = hybrid.available()
    assert available.bytes == 3 * GIB - (100_000 - (5400 - 67))
    assert available.limit_path == hybrid.root / "sys/fs/cgroup/memory/outer/memory.limit_in_bytes"


def test_both_versions_at_once_count(hybrid: Tree) -> None:
    hybrid.v1("sys/fs/cgroup/memory/outer/inner", 3 * GIB, 0)
    hybrid.v2("sys/fs/cgroup/unified", str(2 * GIB), 0)
    assert hybrid.available().bytes == 2 * GIB


def test_a_container_sees_its_own_group_at_the_mount(tree: Tree) -> None:
    tree.member_of("4:memory:/docker/abc/job")
    tree.mount("/sys/fs/cgroup/memory", "cgroup", shows="/docker/abc", options="rw,memory")
    tree.v1("sys/fs/cgroup/memory", 2 * GIB, 11)
    tree.v1("sys/fs/cgroup/memory/job", NO_LIMIT_V1, 5)
    assert tree.available().bytes == 2 * GIB - 11


def test_a_mount_that_begins_above_the_namespace_still_bounds(tree: Tree) -> None:
    tree.member_of("0::/")
    tree.mount("/sys/fs/cgroup", "cgroup2", shows="/../..")
    tree.v2("sys/fs/cgroup", str(2 * GIB), 11)
    assert tree.available().bytes == 2 * GIB - 11


@pytest.mark.parametrize(
    ("group", "shows"),
    [("/../..", "/"), ("/../other", "/"), ("/docker/abc", "/docker/ab"), ("/a", "/a/b"), ("/a", "/../b")],
)
def test_a_group_that_cannot_be_seen_bounds_nothing_and_is_reported(tree: Tree, group: str, shows: str) -> None:
    tree.member_of(f"0::{group}")
    tree.mount("/sys/fs/cgroup", "cgroup2", shows=shows)
    tree.v2("sys/fs/cgroup", str(2 * GIB), 11)
    available = tree.available()
    assert available.bytes == 16 * GIB
    assert available.unread == (f"group {group} is not visible at /sys/fs/cgroup, which shows {shows}",)


def test_parents_count_where_the_own_group_is_gone(unified: Tree) -> None:
    (unified.root / "sys/fs/cgroup/outer/inner").rmdir()
    unified.v2("sys/fs/cgroup/outer", str(2 * GIB), 11)
    available = unified.available()
    assert available.bytes == 2 * GIB - 11
    assert available.unread == (f"{unified.root}/sys/fs/cgroup/outer/inner is not visible",)


def test_a_mount_point_with_a_space_is_found(tree: Tree) -> None:
    tree.member_of("0::/a b")
    tree.mount("/sys/my\\040groups", "cgroup2")
    tree.v2("sys/my groups/a b", str(2 * GIB), 11)
    assert tree.available().bytes == 2 * GIB - 11


@pytest.mark.parametrize("text", ["", "12 GiB", "-5", "\xff", "9" * 30, "max 3"])
def test_a_file_that_holds_no_number_is_reported_and_the_others_count(unified: Tree, text: str) -> None:
    unified.v2("sys/fs/cgroup/outer/inner", text, 11, high=str(2 * GIB))
    available = unified.available()
    assert available.bytes == 2 * GIB - 11
    assert len(available.unread) == 1
    assert "inner/memory.max holds no number" in available.unread[0]


def test_a_file_that_cannot_be_read_is_reported_and_the_others_count(unified: Tree) -> None:
    unified.v2("sys/fs/cgroup/outer", str(2 * GIB), 11)
    unified.v2("sys/fs/cgroup/outer/inner", "max", 11)
    for name in ("memory.max", "memory.high"):
        (unified.root / "sys/fs/cgroup/outer/inner" / name).unlink()
        (unified.root / "sys/fs/cgroup/outer/inner" / name).mkdir()
    available = unified.available()
    assert available.bytes == 2 * GIB - 11
    assert [line.rsplit("/", 1)[1] for line in available.unread] == [
        "memory.max: Is a directory",
        "memory.high: Is a directory",
    ]


@pytest.mark.parametrize("text", ["", "nonsense\n", "0:\n", "::\n", "0::relative\n", "4:memory\n"])
def test_nonsense_in_proc_is_no_crash(tree: Tree, text: str) -> None:
    tree.write("proc/self/cgroup", text)
    tree.write("proc/self/mountinfo", f"{text}30 1 0:1 / /sys - cgroup2\n")
    assert tree.available().bytes == 16 * GIB


def test_a_system_without_groups_has_nothing_to_report(tree: Tree) -> None:
    available = tree.available()
    assert (available.bytes, available.unread) == (16 * GIB, ())


def test_without_meminfo_the_free_pages_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"SC_AVPHYS_PAGES": 1001, "SC_PHYS_PAGES": 5000, "SC_PAGE_SIZE": 16384}
    monkeypatch.setattr(os, "sysconf", answers.__getitem__)
    available = available_memory(tmp_path)
    assert available.bytes == 1001 * 16384
    assert available.reason == "sysconf SC_AVPHYS_PAGES: 1001 pages of 16384 bytes are free"


def sysconf_of(answers: dict[str, int]) -> object:
    def sysconf(name: str) -> int:
        if name not in answers:
            raise ValueError("unrecognized configuration name")
        return answers[name]

    return sysconf


def test_where_free_pages_are_not_told_the_physical_ones_count_and_the_reason_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", sysconf_of({"SC_PHYS_PAGES": 5000, "SC_PAGE_SIZE": 16384}))
    available = available_memory(tmp_path)
    assert available.bytes == 5000 * 16384
    assert "how many are free is not told" in available.reason


def test_where_nothing_is_told_the_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", sysconf_of({"SC_PHYS_PAGES": -1, "SC_PAGE_SIZE": 4096}))
    with pytest.raises(MachineError, match="nothing says how much memory there is"):
        available_memory(tmp_path)


def test_this_machine_answers() -> None:
    available = available_memory()
    assert 0 < available.bytes <= available.host_available_bytes
    assert available.reason


V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


def test_a_real_limit_on_a_parent_is_seen_and_read_cache_is_not_held_against_it(tmp_path: Path) -> None:
    """A child process in a real group under a limited parent; it reads a file, so that the group holds page cache."""
    v2_controllers = V2 / "cgroup.subtree_control"
    if (V1 / "memory.limit_in_bytes").exists():
        top, limit, usage = V1, "memory.limit_in_bytes", "memory.usage_in_bytes"
        lists = ("total_inactive_file", "total_active_file")
    elif v2_controllers.exists() and "memory" in v2_controllers.read_text().split():
        top, limit, usage = V2, "memory.max", "memory.current"
        lists = ("inactive_file", "active_file")
    else:
        pytest.skip("no hierarchy of control groups that limits memory")
    parent = top / f"expertstream-test-{os.getpid()}"
    inner = parent / "inner"
    try:
        parent.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made: {error}")
    file = tmp_path / "read"
    file.write_bytes(bytes(range(256)) * (64 * 4096))
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "inner, parent, usage, file = map(Path, sys.argv[1:5])\n"
        "(inner / 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from expertstream.machine import available_memory\n"
        "def cached():\n"
        "    lines = (parent / 'memory.stat').read_text().splitlines()\n"
        "    return sum(int(line.split()[1]) for line in lines if line.split()[0] in sys.argv[5:])\n"
        "fd = os.open(file, os.O_RDONLY)\n"
        "os.fsync(fd)\n"
        "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "while os.read(fd, 1 << 20): pass\n"
        "deadline = time.monotonic() + 10\n"
        "while cached() < 60 << 20 and time.monotonic() < deadline: time.sleep(0.05)\n"
        "available = available_memory()\n"
        "print(available.bytes, available.limit_bytes, available.limit_path, (parent / usage).read_text(), cached())\n"
    )
    try:
        if top == V2:
            (parent / "cgroup.subtree_control").write_text("+memory")
        (parent / limit).write_text(str(GIB))
        inner.mkdir()
        run = subprocess.run(
            [sys.executable, "-c", program, inner, parent, usage, file, *lists],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    finally:
        for group in (inner, parent):
            if group.exists():
                group.rmdir()
    available_bytes, limit_bytes, limit_path, usage_bytes, cache_bytes = run.stdout.split()
    assert (int(limit_bytes), limit_path) == (GIB, str(parent / limit))
    assert 0 < int(available_bytes) < GIB
    if int(cache_bytes) < 60 * 2**20:
        pytest.skip("reading a file here charges no page cache to the group, or it is told later than 10 s after")
    assert int(available_bytes) > GIB - int(usage_bytes) + 50 * 2**20


class TestUsableCores:
    """On a machine with 16 cores that the process may run on, unless its groups have less."""

    @pytest.fixture(autouse=True)
    def sixteen_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def test_without_groups_every_core_counts(self, tree: Tree) -> None:
        assert usable_cores(tree.root) == 16

    @pytest.mark.parametrize(
        ("outer", "inner", "cores"),
        [
            ("max 100000", "max 100000", 16),
            ("max 100000", "200000 100000", 2),
            ("300000 100000", "max 100000", 3),
            ("300000 100000", "800000 100000", 3),
            ("max 100000", "150000 100000", 2),
            ("max 100000", "10000 100000", 1),
            ("max 100000", "6400000 100000", 16),
            ("max 100000", "", 16),
            ("max 100000", "100 0", 16),
        ],
    )
    def test_the_least_quota_on_the_way_up_counts_and_a_part_is_a_core(
        self, unified: Tree, outer: str, inner: str, cores: int
    ) -> None:
        unified.write("sys/fs/cgroup/outer/cpu.max", f"{outer}\n")
        unified.write("sys/fs/cgroup/outer/inner/cpu.max", f"{inner}\n")
        assert usable_cores(unified.root) == cores

    @pytest.mark.parametrize(("quota_us", "cores"), [(-1, 16), (250_000, 3)])
    def test_a_quota_of_version_1_counts(self, tree: Tree, quota_us: int, cores: int) -> None:
        tree.member_of("5:memory:/elsewhere", "4:cpu,cpuacct:/box", "0::/")
        tree.mount("/sys/fs/cgroup/cpu", "cgroup", options="rw,cpu,cpuacct")
        tree.write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", f"{quota_us}\n")
        tree.write("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
        assert usable_cores(tree.root) == cores


def test_a_limit_on_address_space_bounds_what_may_be_taken(tree: Tree) -> None:
    limit = "Max address space         {:<20} {:<20} bytes     \n".format
    tree.write("proc/self/status", "Name:\tpython\nVmPeak:\t  900 kB\nVmSize:\t 1048576 kB\nVmRSS:\t   10 kB\n")
    tree.write("proc/self/limits", "Limit  Soft Limit  Hard Limit  Units\n" + limit("unlimited", "unlimited"))
    assert (tree.available().bytes, tree.available().limit_bytes) == (16 * GIB, None)
    tree.write("proc/self/limits", "Limit  Soft Limit  Hard Limit  Units\n" + limit(3 * GIB, 99 * GIB))
    available = tree.available()
    assert (available.bytes, available.limit_bytes) == (2 * GIB, 3 * GIB)
    assert re.search(
        r"limits allows 3221225472 bytes of address space \(ulimit -v\), and 1073741824 ", available.reason
    )
    tree.write("proc/self/limits", limit(GIB // 2, GIB))
    assert tree.available().bytes == 0


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="this system does not tell its limits there")
def test_the_limit_of_this_process_is_found() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY));"
        "from expertstream import available_memory; print(available_memory().limit_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1 << 40
