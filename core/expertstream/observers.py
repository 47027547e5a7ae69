"""What watches a run: the hook wrappers that write the backend's answers into the log.

It never changes an answer. Events are short constant names with fields; nothing is logged on a hit or on a
commit that succeeds, and nothing is ever written to standard output by default.
"""

from __future__ import annotations

from collections.abc import Generator

from expertstream.hookspecs import hookimpl
from expertstream.log import get_log
from expertstream.slots import Commit, HostSlots, SlotBudget, SlotLayout, SlotStore, Staging


class LogHooks:
    """Hook wrappers that log what the backend grants, allocates and fails at. Register one in the plugin manager."""

    @hookimpl(wrapper=True)
    def budget_for_expert_size(
        self, expert_bytes: int, resident_bytes: int, asked: int | None, other_slots_bytes: int
    ) -> Generator[None, SlotBudget, SlotBudget]:
        # Not called resident_bytes here: caches, workspace and the slots of other sizes are among them.
        fields = {
            "slot_bytes": expert_bytes,
            "beside_bytes": resident_bytes,
            "other_slots_bytes": other_slots_bytes,
            "asked_slots": asked,
        }
        try:
            budget = yield
        except Exception as error:
            get_log().info("budget_failed", **fields, error=_described(error))
            raise
        if isinstance(budget, SlotBudget):  # all else is refused by who asked
            granted = {"slot_count": budget.slots, "staging_bytes": budget.staging_bytes, "reason": budget.reason}
            get_log().info("slots_granted", **fields, **granted)
        return budget

    @hookimpl(wrapper=True)
    def alloc_slot_store(self, layout: SlotLayout, slot_count: int) -> Generator[None, SlotStore, SlotStore]:
        fields = {"slot_bytes": layout.slot_bytes, "slot_count": slot_count}
        try:
            store = yield
        except Exception as error:
            get_log().info("slot_store_failed", **fields, error=_described(error))
            raise
        get_log().info("slot_store_allocated", **fields, total_bytes=layout.slot_bytes * slot_count)
        return store

    @hookimpl(wrapper=True)
    def alloc_host_slots(self, store: SlotStore, slot_count: int) -> Generator[None, HostSlots, HostSlots]:
        try:
            return (yield)
        except Exception as error:
            fields = {"slot_bytes": store.layout.slot_bytes, "slot_count": slot_count}
            get_log().info("host_slots_failed", **fields, error=_described(error))
            raise

    @hookimpl(wrapper=True)
    def commit_slot(self, staging: Staging) -> Generator[None, Commit, Commit]:
        try:
            return (yield)
        except Exception as error:
            get_log().warning("commit_failed", slot=staging.slot, error=_described(error))
            raise


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
