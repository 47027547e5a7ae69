"""How much of the machine this process may take: memory, with the number that says so, and cores.

Three kinds of numbers bound it: what the host has, the limits of the control groups that the process is in, each group
on the path to the root, and the process's own limit on address space. Files that cannot be read are reported, never
fatal.
Sources: proc(5), the kernel's admin-guide/cgroup-v2, admin-guide/cgroup-v1/memory and scheduler/sched-bwc.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from expertstream.errors import MachineError


@frozen
class AvailableMemory:
    """`bytes` may be taken now, without swapping; `reason` is the sentence that says which file decided.

    `limit_bytes` and `limit_path` are of the limit with the least room, a control group's or the process's, None where
    there is none.
    `unread` says what could not be looked at.
    """

    bytes: int
    reason: str
    host_available_bytes: int
    limit_bytes: int | None = None
    limit_path: Path | None = None
    unread: tuple[str, ...] = ()


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """What this process may still take: the least of what the host has available and what each limit leaves.

    `root` is where /proc and /sys are looked for. Raises MachineError where nothing tells how much memory there is.
    """
    unread: list[str] = []
    host_bytes, host_reason = _host_available(root, unread)
    rooms = [
        room
        for directory, version in _group_directories(root, "memory", unread)
        for room in _rooms(_MEMORY_FILES[version](directory), unread)
    ]
    rooms.extend(_address_space(root, unread))
    tightest = min(rooms, key=lambda room: room.bytes, default=None)
    if tightest is None:
        return AvailableMemory(host_bytes, host_reason, host_bytes, unread=tuple(unread))
    decided_by_host = host_bytes <= tightest.bytes
    return AvailableMemory(
        bytes=host_bytes if decided_by_host else tightest.bytes,
        reason=f"{host_reason}; {tightest} would leave more" if decided_by_host else f"{tightest}; {host_reason}",
        host_available_bytes=host_bytes,
        limit_bytes=tightest.limit_bytes,
        limit_path=tightest.limit_path,
        unread=tuple(unread),
    )


def usable_cores(root: Path = Path("/")) -> int:
    """How many cores this process may keep busy, at least 1: those it may run on, or less by its groups' quotas.

    `root` is where /proc and /sys are looked for. Part of a core counts as one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    unread: list[str] = []
    shares = [_core_share(*group, unread) for group in _group_directories(root, "cpu", unread)]
    return max(1, min([cores, *(math.ceil(share) for share in shares if share is not None)]))


@frozen
class _Group:
    """One control group's directory and the names of its files in its version of the interface."""

    directory: Path
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    dirty: tuple[str, ...]


@frozen
class _Room:
    """What one limit leaves."""

    limit_path: Path
    limit_bytes: int
    usage_bytes: int
    reclaimable_bytes: int = 0

    @property
    def bytes(self) -> int:
        return max(0, self.limit_bytes - (self.usage_bytes - self.reclaimable_bytes))

    def __str__(self) -> str:
        return (
            f"{self.limit_path} allows {self.limit_bytes} bytes, and {self.usage_bytes} are in use, of which "
            f"{self.reclaimable_bytes} are file cache that can be reclaimed: {self.bytes} left"
        )


@frozen
class _AddressSpace(_Room):
    """What the limit on address space leaves, at most: a process takes more of that than of memory."""

    def __str__(self) -> str:
        return (
            f"{self.limit_path} allows {self.limit_bytes} bytes of address space (ulimit -v), and"
            f" {self.usage_bytes} are taken: {self.bytes} left"
        )


def _host_available(root: Path, unread: list[str]) -> tuple[int, str]:
    meminfo = root / "proc/meminfo"
    found = re.search(r"^MemAvailable: +(\d+) kB$", _text_of(meminfo, unread) or "", re.MULTILINE)
    if found:
        host_bytes = int(found[1]) * 1024
        return host_bytes, f"{meminfo} says MemAvailable: {host_bytes} bytes"
    for name, meaning in (
        ("SC_AVPHYS_PAGES", "free"),
        ("SC_PHYS_PAGES", "in the machine; how many are free is not told"),
    ):
        try:
            page_count, page_bytes = os.sysconf(name), os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            continue
        if page_count > 0 and page_bytes > 0:
            return page_count * page_bytes, f"sysconf {name}: {page_count} pages of {page_bytes} bytes are {meaning}"
    raise MachineError(f"nothing says how much memory there is: no MemAvailable in {meminfo}, no page count in sysconf")


def _group_directories(root: Path, controller: str, unread: list[str]) -> Iterator[tuple[Path, str]]:
    """Every visible group on the way from this process to the root of each hierarchy that may have the controller.

    Each with the version of the interface, "cgroup" or "cgroup2", as mounts name them.
    """
    paths: dict[str, str] = {}
    for number, controllers, path in _MEMBERSHIP.findall(_text_of(root / "proc/self/cgroup", unread) or ""):
        if controller in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    for mount in _MOUNT.finditer(_text_of(root / "proc/self/mountinfo", unread) or ""):
        kind, mount_root, mount_point = mount["kind"], _unescaped(mount["root"]), _unescaped(mount["point"])
        if kind not in paths or (kind == "cgroup" and controller not in mount["options"].split(",")):
            continue
        below = _below_mount(paths[kind], mount_root)
        if below is None:
            unread.append(f"group {paths[kind]} is not visible at {mount_point}, which shows {mount_root}")
            continue
        names = [name for name in below.split("/") if name]
        for depth in range(len(names), -1, -1):
            directory = (root / mount_point.lstrip("/")).joinpath(*names[:depth])
            if os.path.isdir(directory):
                yield directory, kind
            else:
                unread.append(f"{directory} is not visible")


_MEMBERSHIP = re.compile(r"^(\d+):([^:\n]*):(/.*)$", re.MULTILINE)
"""A line of /proc/self/cgroup: hierarchy, controllers, path."""

_MOUNT = re.compile(
    r"^\d+ \d+ \S+ (?P<root>\S+) (?P<point>\S+) .*- (?P<kind>cgroup2?) \S+ (?P<options>\S+)$", re.MULTILINE
)
"""A line of /proc/self/mountinfo that mounts control groups."""


def _below_mount(path: str, mount_root: str) -> str | None:
    """The group's path below the mount, "" where only the mount itself is known to be on its way up, None if neither.

    Both arguments count from the namespace's root, and lead with /.. where they are above or beside it.
    """
    if mount_root == "/" or path == mount_root or path.startswith(mount_root + "/"):
        below = path.removeprefix(mount_root)
        return None if ".." in below.split("/") else below
    return "" if set(mount_root.strip("/").split("/")) == {".."} else None


def _v2(directory: Path) -> _Group:
    return _Group(
        directory,
        limits=("memory.max", "memory.high"),
        usage="memory.current",
        cache=("inactive_file", "active_file"),
        dirty=("file_dirty", "file_writeback"),
    )


def _v1(directory: Path) -> _Group:
    # A group's usage counts its children's; so do the statistics that begin with total_.
    return _Group(
        directory,
        limits=("memory.limit_in_bytes",),
        usage="memory.usage_in_bytes",
        cache=("total_inactive_file", "total_active_file"),
        dirty=("total_dirty", "total_writeback"),
    )


_MEMORY_FILES = {"cgroup": _v1, "cgroup2": _v2}

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 has no word for "no limit": it shows the largest multiple of a page, just below 2^63."""


def _rooms(group: _Group, unread: list[str]) -> Iterator[_Room]:
    limits = {path: _number_in(path, unread) for path in (group.directory / name for name in group.limits)}
    finite = {path: number for path, number in limits.items() if number is not None and number < _NO_LIMIT_BYTES}
    if not finite:
        return
    # A limit still bounds where the use is not told: as if nothing were in use.
    usage_bytes = _number_in(group.directory / group.usage, unread) or 0
    reclaimable_bytes = min(usage_bytes, _reclaimable_bytes(group, unread))
    for path, limit_bytes in finite.items():
        yield _Room(path, limit_bytes, usage_bytes, reclaimable_bytes)


def _address_space(root: Path, unread: list[str]) -> Iterator[_AddressSpace]:
    limits = root / "proc/self/limits"
    limit = re.search(r"^Max address space +(\d+) ", _text_of(limits, unread) or "", re.MULTILINE)
    taken = re.search(r"^VmSize:\s+(\d+) kB$", _text_of(root / "proc/self/status", unread) or "", re.MULTILINE)
    if limit:
        yield _AddressSpace(limits, int(limit[1]), int(taken[1]) * 1024 if taken else 0)


def _reclaimable_bytes(group: _Group, unread: list[str]) -> int:
    """Clean file cache, which the kernel drops before it refuses memory to the group.

    Both lists count: a checkpoint that was read twice sits on the active one and is dropped as well. The lists hold
    neither shared memory nor locked pages. What is dirty or being written back has to reach the disk first.
    """
    text = _text_of(group.directory / "memory.stat", unread) or ""
    numbers = {name: int(number) for name, number in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
    clean = sum(numbers.get(name, 0) for name in group.cache) - sum(numbers.get(name, 0) for name in group.dirty)
    return max(0, clean)


def _core_share(directory: Path, version: str, unread: list[str]) -> float | None:
    """Cores that the quota of one group is worth, None where it has none."""
    if version == "cgroup2":
        names: tuple[str, ...] = ("cpu.max",)  # "max 100000" or, in microseconds, "QUOTA PERIOD"
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # -1 is no quota
    texts = [_text_of(directory / name, unread) or "" for name in names]
    found = re.fullmatch(r"([0-9]{1,19}) ([0-9]{1,19})", " ".join(" ".join(texts).split()))
    return int(found[1]) / int(found[2]) if found and int(found[2]) else None


def _number_in(path: Path, unread: list[str]) -> int | None:
    """None where there is no number: "max", or no file, as in the root of a hierarchy, which has no limit."""
    text = _text_of(path, unread)
    if text is None or text.strip() == "max":
        return None
    if not re.fullmatch(r"[0-9]{1,20}\n?", text):
        unread.append(f"{path} holds no number: {text[:40]!r}")
        return None
    return int(text)


def _text_of(path: Path, unread: list[str]) -> str | None:
    """None where there is no such file, which is no news, and where it cannot be read, which is."""
    try:
        return path.read_text("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        unread.append(f"{path}: {error.strerror}")
        return None


def _unescaped(name: str) -> str:
    r"""A name of mountinfo, where space, tab, newline and backslash are written as \ooo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
