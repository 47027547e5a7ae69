"""The host tier below a device's slots, against the bytes of telling checkpoints, with growth and failures injected."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import checkpoint_files
from expertstream import (
    BackendContractError,
    CommitFailed,
    Demand,
    DeviceOutOfMemory,
    ExpertStreamer,
    HostSlots,
    HostTiering,
    Lease,
    MachineError,
    MemoryRequest,
    ReadFailed,
    SlotStore,
    Staging,
    StoreClosed,
    available_memory,
    hookimpl,
    host_tier,
    make_plan,
    open_backend,
    open_checkpoint,
    residency,
    size_classes,
    smallest_expert_memory_bytes,
)
from expertstream import streamer as streamer_module
from expertstream.backends import GROUP
from expertstream.filler import Filler, open_raw_file
from expertstream.host_tier import HostTier
from suite_runs import BROKEN

NO_DEMAND = Demand(resident_bytes=0, kv_cache_bytes=0, workspace_bytes=0, context_tokens=0)
LAYERS, EXPERTS = 4, 8
KINDS: tuple[HostTiering, ...] = ("inclusive", "exclusive")


@pytest.fixture(autouse=True)
def _tiered_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with copies that are late, and with host slots."""
    monkeypatch.syspath_prepend(str(BROKEN))
    entry = metadata.EntryPoint("tiered", "expertstream_broken.sound_tiered", GROUP)
    real = metadata.entry_points
    monkeypatch.setattr(
        metadata, "entry_points", lambda **wanted: (entry,) if wanted.get("group") == GROUP else real(**wanted)
    )
    monkeypatch.setattr(host_tier, "FEWEST_SLOTS", 2)


@pytest.fixture
def written(tmp_path: Path) -> checkpoint_files.Written:
    """Four layers in two size classes, none of whose parts is whole pages, in two shards."""
    return checkpoint_files.write_checkpoint(tmp_path / "telling.gguf", shards=2)


def open_tiered(
    written: checkpoint_files.Written,
    kind: HostTiering,
    *,
    slots: str = "25%",
    host: str = "all",
    grown: bool = True,
    observers: Sequence[object] = (),
    **options: object,
) -> ExpertStreamer:
    checkpoint = open_checkpoint(written.path)
    backend = open_backend("tiered", observers)
    plan = make_plan(
        checkpoint,
        NO_DEMAND,
        MemoryRequest.parse(slots),
        backend,
        available_memory(),
        host_request=MemoryRequest.parse(host),
        host_tiering=kind if host != "0" else None,
    )
    streamer = ExpertStreamer(checkpoint, plan, backend, **options)  # type: ignore[arg-type]  # options of every type
    if grown:
        wait_for_growth(streamer)
    return streamer


def wait_for_growth(streamer: ExpertStreamer) -> None:
    while (state := streamer.host_tier) is not None and state.is_growing:
        for thread in threading.enumerate():
            if thread.name == "host-tier":
                thread.join()


def wrong(lease: Lease, written: checkpoint_files.Written) -> list[str]:
    return [
        f"layer {lease.layer} expert {expert} {name}"
        for position, expert in enumerate(lease.experts.tolist())
        for name, view in lease.view(position).items()
        if view.tobytes() != written.part_bytes(lease.layer, expert, name)
    ]


def use(streamer: ExpertStreamer, written: checkpoint_files.Written, layer: int, *experts: int) -> None:
    with streamer.acquire(layer, experts) as lease:
        assert wrong(lease, written) == []


def use_all(streamer: ExpertStreamer, written: checkpoint_files.Written) -> None:
    for layer, expert in every_expert():
        use(streamer, written, layer, expert)


def every_expert() -> Iterator[tuple[int, int]]:
    return itertools.product(range(LAYERS), range(EXPERTS))


class Pieces:
    """An observer that counts the pieces of a tier, and refuses those of more slots than `largest` or after `most`."""

    def __init__(self, largest: int = 1 << 30, most: int = 1 << 30, error: Exception | None = None) -> None:
        self.largest, self.most, self.error = largest, most, error
        self.asked: list[int] = []
        self.got = 0

    @hookimpl(wrapper=True)
    def alloc_host_slots(self, store: SlotStore, slot_count: int) -> Generator[None, HostSlots, HostSlots]:
        self.asked.append(slot_count)
        piece = yield
        if self.error is not None:
            raise self.error
        if slot_count > self.largest or self.got + slot_count > self.most:
            raise DeviceOutOfMemory(f"{slot_count} host slots are too many for this test")
        self.got += slot_count
        return piece


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_tier_keeps_is_not_read_again(written: checkpoint_files.Written, kind: HostTiering) -> None:
    with open_tiered(written, kind) as streamer:
        for layer, expert in every_expert():
            use(streamer, written, layer, expert)
        read = streamer.counters
        assert read.expert_bytes_read == sum(len(written.expert_bytes(*key)) for key in every_expert())
        for layer, expert in every_expert():
            use(streamer, written, layer, expert)
        again = streamer.counters - read
        assert again.expert_bytes_read == 0
        assert again.hits + again.misses == LAYERS * EXPERTS
        assert again.host_hits == again.misses > 0
        assert read.disk_wait_s > again.disk_wait_s == 0  # copies are no reads


def test_a_miss_from_the_file_fills_an_inclusive_tier_without_another_read_or_copy(
    written: checkpoint_files.Written,
) -> None:
    with open_tiered(written, "inclusive") as streamer:
        use(streamer, written, 0, 3)
        counted = streamer.counters
        assert counted.expert_bytes_read == len(written.expert_bytes(0, 3))
        assert counted.h2d_bytes == len(memoryview(streamer.device_view(0)))  # one slot
        assert counted.d2h_bytes == counted.host_hits == 0


def test_an_exclusive_tier_and_the_slots_together_hold_what_neither_could(written: checkpoint_files.Written) -> None:
    """Slots for half and host slots for two thirds: an inclusive tier must read again, an exclusive one need not."""
    read_bytes = {}
    for kind in KINDS:
        with open_tiered(written, kind, slots="75%", host="90%") as streamer:
            for layer, expert in (*every_expert(), *every_expert(), *every_expert()):
                use(streamer, written, layer, expert)
            counted = streamer.counters
            assert (counted.d2h_bytes > 0) == (kind == "exclusive")
            read_bytes[kind] = counted.expert_bytes_read
    assert read_bytes["exclusive"] == sum(len(written.expert_bytes(*key)) for key in every_expert())
    assert read_bytes["inclusive"] > read_bytes["exclusive"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["10%", "40%", "all"])
def test_any_order_of_steps_finds_the_right_bytes(
    written: checkpoint_files.Written, kind: HostTiering, host: str
) -> None:
    """Also while the tier grows, with leases ended on a stream, rounds and plain steps mixed."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    with open_tiered(written, kind, host=host, grown=False) as streamer:
        for _ in range(120):
            layer = choose.randrange(LAYERS)
            if choose.random() < 0.3:
                experts = sorted(choose.sample(range(EXPERTS), choose.randint(1, EXPERTS)))
                counts = [choose.randint(1, 3) for _ in experts]
                streamer.begin_pass(sum(counts))
                for lease in streamer.rounds(layer, experts, counts):
                    assert wrong(lease, written) == []
            else:
                streamer.begin_pass(1)
                lease = streamer.acquire(layer, choose.sample(range(EXPERTS), 2))
                assert wrong(lease, written) == []
                lease.release(stream=7 if choose.random() < 0.5 else None)
        counted = streamer.counters
        assert counted.host_hits <= counted.misses


@pytest.mark.parametrize(
    ("kind", "used_before", "host_hits"),
    [("exclusive", [(0, 5), (0, 6), (0, 7), (1, 0), (1, 1)], 3), ("inclusive", [(0, 5), (0, 6), (0, 7)], 2)],
)
def test_what_a_step_in_rounds_needs_later_is_not_given_up(
    written: checkpoint_files.Written, kind: HostTiering, used_before: list[tuple[int, int]], host_hits: int
) -> None:
    """Three experts of layer 0 are in a tier of three. Others are read and, of the slots of an exclusive one, leave."""
    checkpoint = open_checkpoint(written.path)
    slot_bytes = size_classes(checkpoint)[0].layout.slot_bytes
    slots = str(smallest_expert_memory_bytes(checkpoint))
    with open_tiered(written, kind, slots=slots, host=str(3 * slot_bytes)) as streamer:
        for layer, expert in used_before:
            use(streamer, written, layer, expert)
        before = streamer.counters
        streamer.begin_pass(EXPERTS)
        for lease in streamer.rounds(0, range(EXPERTS), [1] * EXPERTS):
            assert wrong(lease, written) == []
        assert (streamer.counters - before).host_hits == host_hits
        assert streamer._tier is not None
        assert not streamer._tier._tables.turn.any()


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_share_a_tier(written: checkpoint_files.Written, kind: HostTiering) -> None:
    failures: list[str] = []
    with open_tiered(written, kind, slots="75%", host="40%") as streamer:

        def steps(layer: int) -> None:
            choose = random.Random(layer)
            for _ in range(60):
                with streamer.acquire(layer, choose.sample(range(EXPERTS), 2)) as lease:
                    failures.extend(wrong(lease, written))

        threads = [threading.Thread(target=steps, args=(layer,)) for layer in (0, 1)]  # of one class
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_the_tier_grows_in_pieces_and_says_how_far_it_is(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "PIECE_BYTES", 1)
    pieces = Pieces()
    with open_tiered(written, "inclusive", observers=[pieces]) as streamer:
        state = streamer.host_tier
        assert state is not None
        assert (state.slot_count, state.planned_slots, state.is_growing) == (LAYERS * EXPERTS,) * 2 + (False,)
        assert pieces.asked == [1] * (LAYERS * EXPERTS)
        assert state.pinned_bytes > sum(len(written.expert_bytes(*key)) for key in every_expert())


def test_a_piece_that_cannot_be_had_is_halved_and_what_was_got_is_used_and_said(
    written: checkpoint_files.Written,
) -> None:
    pieces = Pieces(largest=6, most=12)
    with capture_logs() as events, open_tiered(written, "inclusive", observers=[pieces]) as streamer:
        state = streamer.host_tier
        assert state is not None
        assert state.slot_count == pieces.got == 12
        assert pieces.asked[:3] == [24, 8, 12]  # two size classes in turn
        for layer, expert in (*every_expert(), *every_expert()):
            use(streamer, written, layer, expert)
    (said,) = [event for event in events if event["event"] == "host_tier_smaller"]
    assert (said["slots"], said["planned"], said["log_level"]) == (12, 32, "warning")
    assert "too many for this test" in said["reason"]


def test_a_tier_that_gets_nothing_is_off_and_says_why(written: checkpoint_files.Written) -> None:
    pieces = Pieces(most=0)
    with capture_logs() as events, open_tiered(written, "inclusive", observers=[pieces]) as streamer:
        use(streamer, written, 0, 1)
        assert streamer.counters.host_hits == 0
    assert pieces.asked == [24, 8, 12, 4, 6, 2, 3, 2]
    (said,) = [event for event in events if event["event"] == "host_tier_off"]
    assert "too many for this test" in said["reason"]


def test_a_class_that_gets_nothing_is_told_apart_from_one_that_gets_all(written: checkpoint_files.Written) -> None:
    class RefusesEight:
        """As a system that has room for small slots alone; the larger class has eight host slots at most."""

        @hookimpl(wrapper=True)
        def alloc_host_slots(self, store: SlotStore, slot_count: int) -> Generator[None, HostSlots, HostSlots]:
            piece = yield
            if slot_count <= 8:
                raise DeviceOutOfMemory("no room for large slots")
            return piece

    with capture_logs() as events, open_tiered(written, "inclusive", observers=[RefusesEight()]) as streamer:
        use_all(streamer, written)
    (said,) = [event for event in events if event["event"] == "host_tier_smaller"]
    assert (said["slots"], said["planned"], said["reason"]) == (24, 32, "no room for large slots")
    assert said["classes"] == "24 of 24 for layers 0-2; 0 of 8 for layer 3"


@pytest.mark.parametrize("refused", [False, True])
def test_a_close_while_the_tier_grows_says_how_far_it_got(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    monkeypatch.setattr(host_tier, "PIECE_BYTES", 1)
    growing, closing = threading.Event(), threading.Event()

    class Waits:
        """The third piece is there only when the tier is closed; the second is refused where that is tried."""

        asked = 0

        @hookimpl(wrapper=True)
        def alloc_host_slots(self, store: SlotStore, slot_count: int) -> Generator[None, HostSlots, HostSlots]:
            piece = yield
            self.asked += 1
            if self.asked == 2 and refused:
                raise DeviceOutOfMemory("no room for large slots")
            if self.asked == 3:
                growing.set()
                closing.wait()
            return piece

    real = HostTier.close

    def close(tier: HostTier, limit_s: float) -> bool:
        tier._is_closing.set()
        closing.set()
        return real(tier, limit_s)

    monkeypatch.setattr(HostTier, "close", close)
    with capture_logs() as events, open_tiered(written, "inclusive", observers=[Waits()], grown=False) as streamer:
        growing.wait()
        tier = streamer._tier
        assert tier is not None
    (said,) = [event for event in events if event["event"].startswith("host_tier_")]
    assert (said["event"], said["slots"], said["planned"]) == ("host_tier_unfinished", 2 if refused else 3, 32)
    assert said["pinned_bytes"] == tier.state.pinned_bytes > 0
    assert said["classes"] == f"2 of 24 for layers 0-2; {0 if refused else 1} of 8 for layer 3"
    assert (said["log_level"], said.get("reason")) == (
        ("warning", "no room for large slots") if refused else ("info", None)
    )


def test_a_tier_that_was_turned_off_says_so(written: checkpoint_files.Written) -> None:
    with capture_logs() as events, open_tiered(written, "inclusive", host="0") as streamer:
        assert streamer.host_tier is None
        use(streamer, written, 0, 1)
    assert [event["reason"] for event in events if event["event"] == "host_tier_off"] == [
        "host memory of 0 was asked for"
    ]


def test_an_error_that_ends_the_growth_is_raised_when_the_next_pass_begins(written: checkpoint_files.Written) -> None:
    pieces = Pieces(error=CommitFailed("the driver is lost"))
    with open_tiered(written, "inclusive", observers=[pieces]) as streamer:
        with pytest.raises(CommitFailed, match="the driver is lost"):
            streamer.begin_pass(1)
        streamer.begin_pass(1)


@pytest.mark.parametrize("order", [KeyboardInterrupt, SystemExit])
def test_what_a_plugin_raises_to_end_the_process_is_an_error_of_the_growth(
    written: checkpoint_files.Written, order: type[BaseException]
) -> None:
    class Ends:
        @hookimpl(wrapper=True)
        def alloc_host_slots(self, store: SlotStore, slot_count: int) -> Generator[None, HostSlots, HostSlots]:
            yield
            raise order("from a driver's library")

    with capture_logs() as events, open_tiered(written, "exclusive", observers=[Ends()]) as streamer:
        use(streamer, written, 0, 1)
        with pytest.raises(BackendContractError, match=f"{order.__name__} was raised while host slots were allocated"):
            streamer.begin_pass(1)
    assert [event["log_level"] for event in events if event["event"] == "host_tier_failed"] == ["error"]


def test_fewer_host_slots_than_asked_break_the_contract(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fewer:
        @hookimpl(wrapper=True)
        def alloc_host_slots(self, store: SlotStore, slot_count: int) -> Generator[None, HostSlots, HostSlots]:
            piece = yield
            piece.slot_count -= 1  # type: ignore[misc]  # that is the fault
            return piece

    with (
        open_tiered(written, "inclusive", observers=[Fewer()]) as streamer,
        pytest.raises(BackendContractError, match="alloc_host_slots made 23 host slots; 24 were asked for"),
    ):
        streamer.begin_pass(1)


def test_a_thread_that_cannot_be_had_is_said_and_leaves_nothing_open(
    written: checkpoint_files.Written, refuse_thread: Callable[[str], None]
) -> None:
    before = set(threading.enumerate())
    refuse_thread("host-tier")
    with pytest.raises(
        MachineError, match=r"the host tier could not be started: .*ulimit -u.*ulimit -v.*host memory of 0"
    ):
        open_tiered(written, "inclusive", grown=False)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("filler")]


def test_kept_bytes_leased_for_another_slot_break_the_contract(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tiered(written, "exclusive") as streamer:
        use_all(streamer, written)
        tier = streamer._tier
        assert tier is not None
        for piece in {id(piece): piece for piece, _ in filter(None, tier._places)}.values():
            lent = piece.restage
            monkeypatch.setattr(
                piece, "restage", lambda place, slot, lent=lent: Staging(slot + 1, lent(place, slot).view)
            )
        with pytest.raises(BackendContractError, match=r"restage\(\d+, \d+\) of backend 'tiered' leased slot \d+"):
            use_all(streamer, written)


class FailingCommits:
    """An observer that fails the commits of one device slot's worth of a count."""

    def __init__(self) -> None:
        self.left = 0

    @hookimpl(wrapper=True)
    def commit_slot(self, store: SlotStore, staging: Staging) -> Generator[None, object, object]:
        commit = yield
        if self.left:
            self.left -= 1
            raise CommitFailed("injected")
        return commit


@pytest.mark.parametrize("kind", KINDS)
def test_a_promotion_that_fails_leaves_nothing_behind(written: checkpoint_files.Written, kind: HostTiering) -> None:
    commits = FailingCommits()
    with open_tiered(written, kind, observers=[commits]) as streamer:
        for layer, expert in every_expert():
            use(streamer, written, layer, expert)
        notes: list[str] = []
        for _ in range(3):
            for layer, expert in every_expert():
                commits.left = 1
                missed = streamer.counters.misses
                try:
                    use(streamer, written, layer, expert)
                except CommitFailed as error:
                    notes += error.__notes__
                assert (streamer.counters.misses > missed) == (commits.left == 0)
        assert any(re.search(r"slot \d+ was filled from host slot \d+", note) for note in notes)
        commits.left = 0
        for layer, expert in (*every_expert(), *every_expert()):
            use(streamer, written, layer, expert)
        assert streamer._tier is not None
        assert not streamer._tier._tables.leases.any()
        assert not streamer._tables.leases.any()


@pytest.mark.parametrize("method", ["keep", "restage", "stage"])
def test_what_a_host_slot_raises_names_backend_and_method_and_loses_nothing(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    kind: HostTiering = "inclusive" if method == "stage" else "exclusive"
    with open_tiered(written, kind, host="all" if method == "restage" else "60%") as streamer:
        use_all(streamer, written)
        tier = streamer._tier
        assert tier is not None
        with monkeypatch.context() as broken:
            for piece in {id(piece): piece for piece, _ in filter(None, tier._places)}.values():
                broken.setattr(piece, method, lambda *_: {}["the driver is lost"])
            with pytest.raises(
                BackendContractError, match=rf"'tiered'.*HostSlots\.{method} raised KeyError"
            ) as failure:
                use_all(streamer, written)
        assert any("slot" in note for note in failure.value.__notes__)
        use_all(streamer, written)
        use_all(streamer, written)
        assert not tier._tables.leases.any()
        assert not streamer._tables.leases.any()


def test_a_read_that_fails_leaves_its_host_slot_empty(written: checkpoint_files.Written) -> None:
    with open_tiered(written, "inclusive") as streamer:
        use(streamer, written, 0, 1)
        with written.files[1].open("r+b") as file:
            file.truncate(written.places["blk.3.ffn_down_exps.weight"][1])
        with pytest.raises(ReadFailed):
            streamer.acquire(3, [7])
        counted = streamer.counters
        use(streamer, written, 0, 1)
        with pytest.raises(ReadFailed):
            streamer.acquire(3, [7])
        assert (streamer.counters - counted).host_hits == 0
        assert streamer._tier is not None
        assert not streamer._tier._tables.leases.any()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_while_the_tier_grows_ends_both(
    written: checkpoint_files.Written, kind: HostTiering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "PIECE_BYTES", 1)
    for _ in range(20):
        open_tiered(written, kind, grown=False).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "host-tier"]


class HeldFile:
    """A real file whose reads wait for `gate` while it is `armed`, and tell when they begin."""

    armed, begun, gate = threading.Event(), threading.Event(), threading.Event()

    def __init__(self, path: Path, direct: bool) -> None:
        self._raw = open_raw_file(path, direct)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        if self.armed.is_set():
            self.begun.set()
            self.gate.wait(60)
        return self._raw.pread_into(buffer, offset)

    def close(self) -> None:
        self._raw.close()


@pytest.fixture
def held() -> Iterator[type[HeldFile]]:
    for event in (HeldFile.armed, HeldFile.begun, HeldFile.gate):
        event.clear()
    yield HeldFile
    HeldFile.gate.set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_was_given_up_has_its_host_slot_until_it_ends(
    written: checkpoint_files.Written, kind: HostTiering, held: type[HeldFile]
) -> None:
    with open_tiered(written, kind, slots="40%", open_file=held, read_timeout_s=0.3) as streamer:
        held.armed.set()
        with pytest.raises(ReadFailed):
            streamer.acquire(0, [3])
        held.armed.clear()
        assert streamer._tier is not None
        tables = streamer._tier._tables
        host_slot = int(tables.slot_of[3])
        assert tables.state[host_slot] == residency.LOADING
        for _ in range(2):
            use(streamer, written, 0, 3)  # through another one, or none
        assert tables.state[host_slot] == residency.LOADING
        held.gate.set()
        while tables.state[host_slot] == residency.LOADING:
            use_all(streamer, written)
        use_all(streamer, written)
        assert not tables.leases.any()
        assert not (streamer._tables.state == residency.QUARANTINED).any()


def test_a_close_that_is_interrupted_leaves_open_what_is_written_to_and_another_one_ends_it(
    written: checkpoint_files.Written, held: type[HeldFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    with capture_logs() as events:
        streamer = open_tiered(written, "exclusive", open_file=held)
        for number, (store, _) in enumerate(streamer._classes):
            close = store.close
            store.close = lambda number=number, close=close: (order.append(f"store {number}"), close())  # type: ignore[method-assign]
        held.armed.set()
        lease = streamer.acquire(0, [3], wait=False)
        held.begun.wait()

        def interrupt(filler: Filler, limit_s: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Filler, "_join", interrupt)
            with pytest.raises(KeyboardInterrupt):
                streamer.close()
        assert order == ["store 1"]  # the other one is being read into
        order.append("read ends")
        held.gate.set()
        lease.release()
        streamer.close()
    assert [each for each in order if each != "store 1"] == ["read ends", "store 0"]
    assert [event["reason"] for event in events if event["event"] == "store_left_open"] == [
        "a read or copy that never ended may still write to it"
    ]


def test_a_piece_that_hangs_leaves_the_stores_open_until_it_is_there(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, pinned = threading.Event(), threading.Event()

    class Hangs:
        @hookimpl(wrapper=True)
        def alloc_host_slots(self, store: SlotStore, slot_count: int) -> Generator[None, HostSlots, HostSlots]:
            begun.set()
            pinned.wait(60)
            return (yield)

    monkeypatch.setattr(streamer_module, "_LONGEST_GROWTH_S", 0.1)
    with capture_logs() as events:
        streamer = open_tiered(written, "exclusive", grown=False, observers=[Hangs()])
        begun.wait()
        streamer.close()
        reasons = [event["reason"] for event in events if event["event"] == "store_left_open"]
        assert reasons == ["host memory is still being allocated for it"] * 2
        assert [store.read_back(0) is not None for store, _ in streamer._classes] == [True, True]
        pinned.set()
        wait_for_growth(streamer)
        streamer.close()
    for store, _ in streamer._classes:
        with pytest.raises(StoreClosed):
            store.read_back(0)
