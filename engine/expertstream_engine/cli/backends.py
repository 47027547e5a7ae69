"""`expertstream backends`: what is installed, and whether this machine can use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expertstream_engine.cli.consoles import print_json, print_table, size_text
from expertstream_engine.cli.errors import guarded
from expertstream_engine.cli.options import AsJson, Debug

if TYPE_CHECKING:
    from expertstream import BackendStatus


@guarded
def backends(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the installed backends: whether each can be used here, its device and its memory."""
    from expertstream import probe_backends

    statuses = probe_backends()
    if as_json:
        print_json([_record(status) for status in statuses])
    else:
        heads = ("backend", "from", "usable", "device", "memory", "kernels read host memory")
        print_table(heads, [_row(status) for status in statuses])


def _record(status: BackendStatus) -> dict[str, Any]:
    device = status.device
    return {
        "name": status.offer.name,
        "distribution": status.offer.distribution,
        "version": status.offer.version,
        "usable": status.problem is None,
        "problem": status.problem,
        "device": device.name if device else None,
        "memory_bytes": device.memory_bytes if device else None,
        "free_bytes": device.free_bytes if device else None,
        "host_memory_is_device_addressable": status.addressable,
    }


def _row(status: BackendStatus) -> tuple[str, ...]:
    offer, device = status.offer, status.device
    memory = {"in all": device.memory_bytes, "free": device.free_bytes} if device else {}
    return (
        offer.name,
        f"{offer.distribution} {offer.version}",
        "yes" if status.problem is None else f"no: {status.problem}",
        device.name if device else "",
        ", ".join(f"{size_text(size)} {which}" for which, size in memory.items() if size is not None),
        {None: "", True: "in place", False: "through copies"}[status.addressable],
    )
