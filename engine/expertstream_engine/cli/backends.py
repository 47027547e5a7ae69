"""`expertstream backends`: what is installed, and whether this machine can use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expertstream_engine.cli.consoles import print_json, print_table, put, size_text, starting
from expertstream_engine.cli.errors import guarded
from expertstream_engine.cli.options import AsJson, BackendOptions, ConfigFile, Debug, settings_from

if TYPE_CHECKING:
    from expertstream import BackendStatus, DeclaredOption


@guarded
def backends(
    backend_option: BackendOptions = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the installed backends: whether each can be used here, its device, its memory and its options."""
    with starting():
        from expertstream import probe_backends

        statuses = probe_backends(settings_from(config, backends=backend_option).backends)
    if as_json:
        print_json([_record(status) for status in statuses])
        return
    print_table(("backend", "usable", "device", "memory", "host memory", "from"), [_row(status) for status in statuses])
    if problems := [(status.offer.name, status.problem) for status in statuses if status.problem is not None]:
        put("\n")
        print_table(("not usable", "because"), problems)
    if options := [_option_row(status, option) for status in statuses for option in status.options]:
        put("\n")
        print_table(("--backend-option", "by default", "type"), options)


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
        "options": [{"key": option.key, "type": option.kind, "default": option.default} for option in status.options],
    }


def _row(status: BackendStatus) -> tuple[str, ...]:
    offer, device = status.offer, status.device
    memory = {"in all": device.memory_bytes, "free": device.free_bytes} if device else {}
    return (
        offer.name,
        "yes" if status.problem is None else "no",
        device.name if device else "",
        ", ".join(f"{size_text(size)} {which}" for which, size in memory.items() if size is not None),
        {None: "", True: "read in place", False: "copied from"}[status.addressable],
        f"{offer.distribution} {offer.version}",
    )


def _option_row(status: BackendStatus, option: DeclaredOption) -> tuple[str, ...]:
    default = "must be given" if option.default is None else option.default
    return f"{status.offer.name}.{option.key}", default, option.kind
