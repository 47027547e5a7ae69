"""An expert on its way into a slot, read from a file or promoted from the host tier: how it is waited for and ends.

A load knows its ticket and its commit; what becomes of the slot and of whoever waits is the streamer's business.
"""

from __future__ import annotations

from expertstream.errors import MachineError
from expertstream.filler import Ticket
from expertstream.limits import Unfinished, within
from expertstream.slots import Commit


class Promotion:
    """In place of a ticket: the expert was in the host tier, so nothing is read, and its commit begins at once."""

    __slots__ = ("commit", "error")

    abandoned = False

    def __init__(self) -> None:
        self.commit: Commit | None = None
        self.error: Exception | None = None

    def done(self) -> bool:
        """As a ticket's: whether `wait` returns or raises at once."""
        return self.commit is not None or self.error is not None

    def wait(self) -> Commit:
        """The commit that has begun. Raises what beginning it raised."""
        if self.error is not None:
            raise self.error
        assert self.commit is not None, "a promotion is over before anyone knows of it"
        return self.commit


class Load:
    """An expert on its way into a slot. It ends once, under the streamer's lock, by whoever finds it over first."""

    __slots__ = (
        "error",
        "expert_bytes",
        "host_slot",
        "is_arrived",
        "is_ended",
        "is_ordered",
        "is_stuck",
        "slot",
        "ticket",
    )

    def __init__(self, slot: int, ticket: Ticket | Promotion, expert_bytes: int, host_slot: int = -1) -> None:
        self.slot = slot
        self.ticket = ticket
        self.expert_bytes = expert_bytes
        self.host_slot = host_slot  # which the bytes come through, -1 for none
        self.error: Exception | None = None
        self.is_arrived = False  # the bytes are in host memory, and counted
        self.is_ordered = False  # work on a stream goes on as if the bytes were there
        self.is_stuck = False  # its commit does not end
        self.is_ended = False  # it has failed, and its error says where

    @property
    def is_abandoned(self) -> bool:
        """Whether the slot may still be written to although nobody waits any more."""
        if self.is_stuck:
            try:
                self.is_stuck = not self.ticket.wait().done()
            except Exception:  # noqa: BLE001  # it has failed by now, so it is over; why it was given up is known
                self.is_stuck = False
        return self.is_stuck or self.ticket.abandoned

    def wait_for_bytes(self) -> None:
        """Block until the bytes are in host memory, or never will be: `error` then says why."""
        try:
            self.ticket.wait()
        except Exception as error:  # noqa: BLE001  # whoever needs the expert raises it
            self.error = error

    def wait(self, stream: int | None, left_s: float, limit_s: float) -> None:
        """Block until the host, or work launched on `stream`, sees the bytes, or never will: `error` then says why.

        A commit that the host waits for is given up when what is left of the limit is over.
        """
        try:
            commit = self.ticket.wait()
            if stream is not None:
                commit.order_before(stream)
                self.is_ordered = True
            elif not commit.done():
                within(left_s, commit.wait)
        except Unfinished:
            self.is_stuck = True
            self.error = MachineError(f"a commit has not ended for {limit_s:.3g} s, and was given up: nothing answers")
        except Exception as error:  # noqa: BLE001  # whoever needs the expert raises it
            self.error = error

    def is_visible(self) -> bool:
        """True once everybody sees the bytes, False while not or never; the ticket is done."""
        try:
            return self.error is None and self.ticket.wait().done()
        except Exception as error:  # noqa: BLE001  # whoever needs the expert raises it
            self.error = error
            return False
