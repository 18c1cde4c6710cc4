"""The wire to other hosts' shards: what arrives, in which order, and what strangers cannot do to it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import zmq
from zmq.utils import garbage

from offbeat.cluster import wire
from offbeat.cluster.client import Client, flush, receive
from offbeat.cluster.server import Server
from offbeat.cluster.wire import Keys, Kind, WireError, bind_address
from offbeat.shard import Push

GENERATION = 7
KEYS = Keys.make()


class Memory:
    """Shards that add up what is pushed, in float32, and note who did what in which order."""

    def __init__(self, members: int = 4, sizes: tuple[int, ...] = (3, 1000)):
        self.alarm = self.dealt = 0
        self.shards = [numpy.zeros(size, numpy.float32) for size in sizes]
        self.versions = [0] * len(sizes)
        self.clocks = [[0] * members for _ in sizes]
        self.taken = [[0] * members for _ in sizes]
        self.pushes: list[tuple[int, Push, bool]] = []
        self.resting: list[int] = []
        self.fault: Exception | None = None

    @property
    def count(self) -> int:
        return len(self.shards)

    def may_push(self, shard: int, after: float) -> bool:
        return min(self.taken[shard]) >= after

    def may_pull(self, shard: int, after: float) -> bool:
        return min(self.clocks[shard]) >= after

    def gradient_bytes(self, shard: int, narrow: bool = False) -> int:
        return self.shards[shard].size * (2 if narrow else 4)

    def parameter_bytes(self, shard: int) -> int:
        return self.shards[shard].nbytes

    def apply(self, shard: int, push: Push, data: memoryview, narrow: bool) -> int:
        if self.fault is not None:
            raise self.fault
        self.shards[shard] += numpy.frombuffer(data, numpy.float16 if narrow else numpy.float32)
        self.pushes.append((shard, push, narrow))
        self.clocks[shard][push.member] = push.clock
        self.versions[shard] += 1
        return self.versions[shard]

    def snapshot(self, shard: int, member: int | None) -> tuple[int, bytes]:
        if member is not None:
            self.taken[shard][member] = self.clocks[shard][member]
        return self.versions[shard], self.shards[shard].tobytes()

    def claim(self, member: int, count: int) -> int:
        self.dealt += count
        return self.dealt - count

    def rest(self, member: int) -> None:
        self.resting.append(member)

    def buffers(self) -> bytes:
        return b"buffers" * 100_000


class Sink:
    """Keeps what has come: by shard version, applied, parameters; and the shards in their order."""

    def __init__(self) -> None:
        self.got: dict[int, tuple[int, int, numpy.ndarray[Any, Any]]] = {}
        self.order: list[int] = []

    def __call__(self, shard: int, version: int, applied: int, data: memoryview) -> None:
        self.got[shard] = version, applied, numpy.frombuffer(bytes(data), numpy.float32)
        self.order.append(shard)


class Late(Exception):
    """The test has waited long enough."""


def within(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise Late

    return check


def until(true: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


class Bench:
    """A server and its clients, closed at the end of a test."""

    def __init__(self, memory: Memory):
        self.memory, self.clients = memory, list[Client]()
        self.server = Server(memory, KEYS, GENERATION, range(4), "127.0.0.1")

    def client(self, member: int, address: str | None = None) -> Client:
        one = Client(address or self.server.address, self.server.public, KEYS, GENERATION, member)
        self.clients.append(one)
        one.ready(within(5))
        return one

    def close(self) -> None:
        for one in self.clients:
            one.close()
        self.server.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench(Memory())
    yield one
    one.close()


def fetch(client: Client, after: float = -math.inf, **options: Any) -> Sink:
    sink = Sink()
    client.pull(after, sink, **options)
    receive([client], within(5))
    return sink


def works(bench: Bench, member: int = 3) -> None:
    """An honest worker is served."""
    client = bench.client(member)
    shards = range(bench.memory.count)
    before = [version for version, _, _ in (fetch(client, note=False).got[shard] for shard in shards)]
    for shard in shards:
        client.push(shard, Push(member, 1, 0), bytes(bench.memory.gradient_bytes(shard)))
    after = fetch(client).got
    assert [after[shard][:2] for shard in shards] == [(version + 1, version + 1) for version in before]
    client.close()


# Round trips


@pytest.mark.parametrize("size", [0, 1, 1000, wire.CHUNK // 4, wire.CHUNK // 2 + 5])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_gradient_and_all_that_goes_with_it_arrives_and_parameters_come_back(
    size: int, narrow: bool
) -> None:
    bench = Bench(Memory(sizes=(2, size)))
    try:
        client = bench.client(2)
        assert client.count == 2
        gradient = (numpy.arange(size) % 64).astype(numpy.float16 if narrow else numpy.float32)
        push = Push(2, 5, 0, -math.inf, True, (0.1, -0.0, math.inf, 5e-324), b"\x05\x80")
        client.push(1, push, gradient.data, narrow)
        got = fetch(client).got
        assert bench.memory.pushes == [(1, push, narrow)]
        assert got[0][:2] == (0, 0)
        assert got[1][:2] == (1, 1)
        assert (got[1][2] == gradient).all()
        assert got[1][2].size == size
        assert bench.memory.taken[1][2] == 5
        bench.memory.clocks[0][2] = 9
        fetch(client, shards=[0], note=False)
        assert bench.memory.taken[0][2] == 0
    finally:
        bench.close()


def test_what_is_not_about_one_shard(bench: Bench) -> None:
    client = bench.client(1)
    assert client.buffers(within(5)) == bench.memory.buffers()
    client.claim(5)
    assert client.ticket(within(5)) == 0
    client.claim(1)
    assert client.ticket(within(5)) == 5
    client.rest()
    client.raise_alarm(3)
    flush([client], within(5))
    assert (bench.memory.resting, bench.memory.alarm, client.alarm) == ([1], 3, 3)


def test_a_pull_sees_every_push_before_it(bench: Bench) -> None:
    client = bench.client(0)
    for clock in range(1, 200):
        for shard in (0, 1):
            client.push(shard, Push(0, clock, 0), bytes(bench.memory.gradient_bytes(shard)))
            sink = fetch(client, shards=[shard])
            assert sink.got[shard][:2] == (clock, clock)
    assert [push.clock for shard, push, _ in bench.memory.pushes if shard == 0] == list(range(1, 200))


def test_claims_of_many_workers_are_all_different(bench: Bench) -> None:
    taken: list[list[int]] = [[] for _ in range(4)]

    def work(member: int) -> None:
        client = bench.client(member)
        for clock in range(1, 101):
            client.claim(1 + member)
            client.push(0, Push(member, clock, 0), bytes(12))
            client.pull(-math.inf, Sink())
            first = client.ticket(within(5))
            taken[member].extend(range(first, first + 1 + member))
            receive([client], within(5))

    threads = [threading.Thread(target=work, args=(member,)) for member in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(unit for units in taken for unit in units) == list(range(100 * (1 + 2 + 3 + 4)))
    assert bench.memory.versions == [400, 0]


# Bounds


def test_a_held_pull_comes_when_the_slowest_has_pushed_and_holds_up_nothing_else(bench: Bench) -> None:
    fast, slow = bench.client(0), bench.client(1)
    memory = bench.memory
    memory.clocks = [[1, 0, 9, 9], [1, 1, 9, 9]]
    sink = Sink()
    fast.pull(1, sink)
    with pytest.raises(Late):
        receive([fast], within(0.3))
    assert sink.order == [1]
    fast.claim(1)
    assert fast.ticket(within(5)) == 0
    fetch(slow)
    slow.push(0, Push(1, 1, 0), bytes(12))
    receive([fast], within(5))
    assert sink.order == [1, 0]
    assert sink.got[0][0] == 1


def test_a_held_push_waits_for_all_to_have_taken_and_what_follows_waits_behind_it(bench: Bench) -> None:
    fast, slow = bench.client(0), bench.client(1)
    memory, sink = bench.memory, Sink()
    memory.taken = [[1, 0, 1, 1], [1, 1, 1, 1]]
    memory.clocks = [[1, 1, 1, 1], [1, 1, 1, 1]]
    for shard in (0, 1):
        fast.push(shard, Push(0, 2, 0, after=1), bytes(memory.gradient_bytes(shard)))
    fast.pull(-math.inf, sink)
    with pytest.raises(Late):
        receive([fast], within(0.3))
    assert sink.order == [1]
    assert fetch(slow, shards=[0], note=False).got[0][0] == 0
    fetch(slow, shards=[0])
    receive([fast], within(5))
    assert sink.got[0][:2] == (1, 1)


def test_members_of_the_host_itself_let_others_go_without_a_message(bench: Bench) -> None:
    client, sink = bench.client(0), Sink()
    bench.memory.clocks[0] = bench.memory.clocks[1] = [4, 3, 4, 4]
    client.pull(4, sink)
    with pytest.raises(Late):
        receive([client], within(0.1))
    begun = time.perf_counter()
    bench.memory.clocks[0] = bench.memory.clocks[1] = [4, 4, 4, 4]
    receive([client], within(5))
    assert time.perf_counter() - begun < 1


def test_an_alarm_reaches_those_that_are_held_back_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, other = bench.client(0), bench.client(1)
    held.pull(1, Sink())
    with pytest.raises(Late):
        receive([held], within(0.1))
    other.raise_alarm(12)
    flush([other], within(5))

    monkeypatch.setattr(wire, "CHECK", 20)

    def check() -> None:
        if held.alarm:
            raise Late

    begun = time.perf_counter()
    with pytest.raises(Late):
        receive([held], check)
    assert held.alarm == 12
    assert time.perf_counter() - begun < 5
    bench.memory.alarm = 0
    bench.memory.clocks = [[1] * 4] * 2
    receive([held], within(5))
    assert held.alarm == 0


def test_a_pull_that_was_given_up_never_comes(bench: Bench) -> None:
    client, old, new = bench.client(0), Sink(), Sink()
    client.pull(1, old)
    with pytest.raises(Late):
        receive([client], within(0.1))
    for after in range(100):
        client.pull(min(after, 2), new)
    bench.memory.clocks = [[2] * 4] * 2
    receive([client], within(5))
    flush([client], within(5))
    assert (old.order, sorted(new.order)) == ([], [0, 1])


# Connections and workers that go


class Link:
    """A TCP connection's way to a server that can be cut at any byte."""

    def __init__(self, address: str):
        self._to = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._to)
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._copy, args=(one, other), daemon=True))
                    self._threads[-1].start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(50_000):
                other.sendall(piece)
        self._end(one, other)

    def _end(self, *sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        sockets, self._open = self._open, []
        self._end(*sockets)

    def close(self) -> None:
        self._end(self._listener)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=5)


def test_every_push_is_applied_once_however_often_the_connection_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(Memory(sizes=(300_000, 5)))
    link = Link(bench.server.address)
    done = threading.Event()

    def cut() -> None:
        at_random = random.Random(3)
        while not done.wait(at_random.uniform(0, 0.15)):
            link.cut()

    cutter = threading.Thread(target=cut)
    try:
        client = bench.client(0, link.address)
        gradients = [numpy.ones(300_000, numpy.float32), numpy.ones(5, numpy.float32)]
        cutter.start()
        tickets, clock, end = [], 0, time.monotonic() + 1.2
        while time.monotonic() < end:
            clock += 1
            client.claim(1)
            for shard in (0, 1):
                client.push(shard, Push(0, clock, 0), gradients[shard].data)
            sink = Sink()
            client.pull(-math.inf, sink)
            tickets.append(client.ticket(within(10)))
            receive([client], within(10))
            assert [sink.got[shard][:2] for shard in (0, 1)] == [(clock, clock)] * 2
        assert clock > 3
        assert tickets == list(range(clock))
        assert [push.clock for _, push, _ in bench.memory.pushes] == [1 + i // 2 for i in range(2 * clock)]
        assert all((shard == clock).all() for shard in bench.memory.shards)
    finally:
        done.set()
        cutter.join()
        bench.close()
        link.close()


def test_a_server_that_is_gone_leaves_the_worker_to_its_check(bench: Bench) -> None:
    client = bench.client(0)
    client.pull(1, Sink())
    bench.server.close()
    calls: list[float] = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise Late

    begun = time.monotonic()
    for wait in (lambda: receive([client], check), lambda: client.buffers(check)):
        calls.clear()
        with pytest.raises(Late):
            wait()
    assert time.monotonic() - begun < 2.5


def test_a_worker_started_anew_takes_the_place_of_the_one_before(bench: Bench) -> None:
    bench.memory.taken[0][1] = -5
    before = bench.client(0)
    before.push(0, Push(0, 1, 0, after=0), bytes(12))
    before.claim(1)
    before.ticket(within(5))
    after = bench.client(0)
    bench.memory.taken[0][1] = 0
    assert fetch(after, shards=[0]).got[0][0] == 0  # what the dead one had waiting is gone
    with pytest.raises(WireError, match="that another has replaced"):
        fetch(before)


def test_nothing_is_left_after_closing() -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def once() -> None:
        bench = Bench(Memory(sizes=(100_000,)))
        for member in (0, 1):
            client = bench.client(member)
            client.push(0, Push(member, 1, 0), bytes(400_000))
            client.pull(5, Sink())
            client.close()
            client.close()
        begun = time.perf_counter()
        bench.close()
        bench.close()
        assert time.perf_counter() - begun < 2

    if not garbage.gc.is_alive():  # pyzmq's one thread for the process comes with some first zero-copy send
        garbage.gc.start()
    once()
    before, descriptors = threads(), len(os.listdir("/proc/self/fd"))
    once()
    end = time.perf_counter() + 5
    # The kernel lists a joined thread a moment longer.
    while threads() - before and time.perf_counter() < end:
        time.sleep(0.01)
    assert threads() <= before  # others of this process may have ended
    assert len(os.listdir("/proc/self/fd")) == descriptors


# Strangers


def raw(bench: Bench, data: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", int(bench.server.address.rpartition(":")[2])))
    one.sendall(data)
    return one


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def test_garbage_to_the_port_disturbs_nobody(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    at_random = random.Random(5)
    client = bench.client(0)
    pieces = [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        GREETING,
        GREETING + b"\x04\xff" + b"\x05HELLO" + bytes(500),
        GREETING + b"\x06" + b"\x7f" + b"\xff" * 7 + b"\x05HELLO",  # announces 2^63 bytes
        GREETING.replace(b"CURVE", b"NULL\0") + b"\x04\x26\x05READY",
        *(at_random.randbytes(at_random.randrange(3000)) for _ in range(60)),
        *(GREETING + at_random.randbytes(at_random.randrange(3000)) for _ in range(60)),
    ]
    sockets = [raw(bench, piece) for piece in pieces]  # and all of them stay half open
    for clock in range(1, 50):
        client.push(0, Push(0, clock, 0), bytes(12))
        assert fetch(client).got[0][0] == clock
    for one in sockets:
        one.close()
    works(bench)
    assert 1 <= len(caplog.records) <= 11


def strangers(server: Server) -> dict[str, dict[str, Any]]:
    other = Keys.make()
    mine = {"curve_publickey": KEYS.public.encode(), "curve_secretkey": KEYS.secret.encode()}
    theirs = {"curve_publickey": other.public.encode(), "curve_secretkey": other.secret.encode()}
    return {
        "no mechanism": {},
        "a password": {"plain_username": b"rank0", "plain_password": b"secret"},
        "a key of its own": {**theirs, "curve_serverkey": server.public.encode()},
        "the public key only": {
            **theirs,
            "curve_publickey": KEYS.public.encode(),
            "curve_secretkey": other.secret.encode(),
            "curve_serverkey": server.public.encode(),
        },
        "another server's key": {**mine, "curve_serverkey": other.public.encode()},
    }


HELLO = wire.REQUEST.pack(b"OFFB", 1, Kind.HELLO, 0, GENERATION, 1) + struct.pack("<q", 1)


def test_nobody_comes_in_without_the_job_s_key(bench: Bench) -> None:
    context = zmq.Context()
    sockets = []
    for options in strangers(bench.server).values():
        one = context.socket(zmq.DEALER)
        for name, value in {"linger": 0, **options}.items():
            one.set(getattr(zmq, name.upper()), value)
        one.connect(bench.server.address)
        one.send(HELLO)
        sockets.append(one)
    works(bench)
    time.sleep(0.2)
    assert [one.poll(0) for one in sockets] == [0] * len(sockets)
    assert [session.member for session in bench.server._sessions.values()] == [3]
    context.destroy(linger=0)


@pytest.mark.parametrize(("right", "said"), [("server", "key in"), ("keys", "not this job's"), ("none", "")])
def test_a_worker_of_another_job_is_told(bench: Bench, right: str, said: str) -> None:
    other = Keys.make()
    public, keys = bench.server.public, KEYS
    address = bench.server.address
    if right != "keys":
        keys = other
    else:
        public = other.public
    if right == "none":
        address, said = "tcp://127.0.0.1:9", "nobody answers there"
    client = Client(address, public, keys, GENERATION, 0)
    with pytest.raises(ConnectionError, match=said):
        client.ready(within(5), patience=0.5)
    client.close()


def request(kind: int, number: int, body: bytes = b"", **other: Any) -> bytes:
    fields = {"magic": b"OFFB", "version": 1, "shard": 0, "generation": GENERATION, **other}
    return (
        wire.REQUEST.pack(
            fields["magic"], fields["version"], kind, fields["shard"], fields["generation"], number
        )
        + body
    )


def push_fields(
    member: int = 1,
    clock: int = 1,
    seen: int = 0,
    after: float = -math.inf,
    settings: int = 0,
    missing: int = 0,
    rest: bytes = b"",
) -> bytes:
    return wire.PUSH.pack(member, clock, seen, after, False, False, settings, missing) + rest


# What a worker that has the key may send after its hello, and what it is told; None: nothing.
WRONG: dict[str, tuple[list[bytes], str | None]] = {
    "nothing": ([b""], None),
    "half a header": ([request(Kind.PULL, 2)[:20]], None),
    "another magic": ([request(Kind.PULL, 2, magic=b"PICK")], None),
    "a pickle": ([b"\x80\x04cos\nsystem\n(S'true'\ntR." + bytes(50)], None),
    "another version": ([request(Kind.PULL, 2, version=2)], "format 2"),
    "another generation": ([request(Kind.PULL, 2, generation=6)], "generation 6"),
    "kind 0": ([request(0, 2)], "kind 0"),
    "a reply": ([request(Kind.NOTE, 2)], "kind 8"),
    "kind 200": ([request(200, 2)], "kind 200"),
    "a shard too many": ([request(Kind.PULL, 2, wire.PULL.pack(0, True), shard=2)], "no shard 2"),
    "a push to no shard": ([request(Kind.PUSH, 2, push_fields(), shard=9), bytes(12)], "no shard 9"),
    "a pull after nan": ([request(Kind.PULL, 2, wire.PULL.pack(math.nan, True))], "after nan"),
    "a pull too long": ([request(Kind.PULL, 2, bytes(10))], "10 bytes"),
    "a pull with a block": ([request(Kind.PULL, 2, wire.PULL.pack(0, True)), b"x"], "with a block"),
    "too little gradient": ([request(Kind.PUSH, 2, push_fields()), bytes(11)], "11 bytes of gradient"),
    "too much gradient": ([request(Kind.PUSH, 2, push_fields()), bytes(12), bytes(1)], "13 bytes"),
    "no gradient": ([request(Kind.PUSH, 2, push_fields())], "0 bytes of gradient"),
    "a push cut off": ([request(Kind.PUSH, 2, push_fields()[:-1]), bytes(12)], "bytes of fields"),
    "settings that are not there": (
        [request(Kind.PUSH, 2, push_fields(settings=1)), bytes(12)],
        "1 settings",
    ),
    "a bitmap that is not there": ([request(Kind.PUSH, 2, push_fields(missing=4)), bytes(12)], "4 bytes"),
    "more than announced": ([request(Kind.PUSH, 2, push_fields(rest=b"x")), bytes(12)], "0 settings"),
    "too many settings": (
        [request(Kind.PUSH, 2, push_fields(settings=5000, rest=bytes(40_000))), bytes(12)],
        "5000 settings",
    ),
    "a push after nan": ([request(Kind.PUSH, 2, push_fields(after=math.nan)), bytes(12)], "after nan"),
    "a clock below 0": ([request(Kind.PUSH, 2, push_fields(clock=-1)), bytes(12)], "clock -1"),
    "another's name": ([request(Kind.PUSH, 2, push_fields(member=2)), bytes(12)], "as rank 2"),
    "a claim of nothing": ([request(Kind.CLAIM, 2, struct.pack("<q", 0))], "0 units"),
    "a claim of all": ([request(Kind.CLAIM, 2, struct.pack("<q", 1 << 60))], "units"),
    "half a claim": ([request(Kind.CLAIM, 2, bytes(4))], "4 bytes"),
    "a rest with more": ([request(Kind.REST, 2, bytes(4))], "4 bytes"),
    "a number of the future": ([request(Kind.BUFFERS, 4)], None),
    "more than any message": ([request(Kind.PUSH, 2, push_fields()), bytes(40_000_000)], None),
    "a thousand frames": ([request(Kind.PUSH, 2, push_fields()), *[b"x"] * 1000], "1000 bytes"),
}


class Raw:
    """A client that has the key and says what it likes."""

    def __init__(self, bench: Bench, hello: bytes | None = HELLO):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        options = {"curve_serverkey": bench.server.public, "curve_publickey": KEYS.public}
        for name, value in {**options, "curve_secretkey": KEYS.secret}.items():
            self.socket.set(getattr(zmq, name.upper()), value.encode())
        self.socket.connect(bench.server.address)
        if hello is not None:
            assert self.ask([hello])[5] == Kind.HELLO

    def ask(self, frames: list[bytes]) -> bytes:
        self.socket.send_multipart(frames)
        assert self.socket.poll(5000)
        return self.socket.recv_multipart()[0]

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_message_is_refused_and_changes_nothing(bench: Bench, what: str) -> None:
    frames, said = WRONG[what]
    one = Raw(bench)
    if said is None:
        one.socket.send_multipart(frames)
    else:
        reply = one.ask(frames)
        assert reply[5] == Kind.ERROR
        assert said in reply[wire.REPLY.size :].decode()
    memory = bench.memory
    works(bench)
    assert (memory.dealt, memory.alarm, memory.resting, len(memory.pushes)) == (0, 0, [], 2)
    one.close()


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (request(Kind.HELLO, 1, struct.pack("<q", 4)), "rank 4 is no member"),
        (request(Kind.HELLO, 1, struct.pack("<q", -1)), "rank -1 is no member"),
        (request(Kind.HELLO, 1, b"12"), "2 bytes"),
        (request(Kind.HELLO, 2, struct.pack("<q", 1)), "has not said hello"),
        (request(Kind.HELLO, 1, struct.pack("<q", 1), generation=8), "generation 8"),
        (request(Kind.CLAIM, 1, struct.pack("<q", 1)), "has not said hello"),
    ],
)
def test_a_wrong_hello_is_refused(bench: Bench, hello: bytes, said: str) -> None:
    one = Raw(bench, None)
    reply = one.ask([hello])
    assert reply[5] == Kind.ERROR
    assert said in reply[wire.REPLY.size :].decode()
    assert not bench.server._sessions
    works(bench)
    one.close()


def test_mutilated_messages_never_end_the_server(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    at_random = random.Random(11)
    honest, one = bench.client(0), Raw(bench)
    for number in range(600):
        body = at_random.choice([push_fields(), wire.PULL.pack(0, True), struct.pack("<q", 1), b""])
        good = request(at_random.randrange(1, 8), number % 40, body, shard=at_random.randrange(2))
        bad = bytearray(good + at_random.randbytes(at_random.choice([0, 0, 0, 5])))
        for _ in range(at_random.randrange(4)):
            bad[at_random.randrange(6, len(bad))] = at_random.randrange(256)
        one.socket.send_multipart([bytes(bad), *[bytes(12)] * at_random.choice([0, 0, 1])])
        if number % 50 == 0:
            assert fetch(honest).got[0][0] == bench.memory.versions[0]
    assert bench.server._thread.is_alive()
    works(bench)
    assert len(caplog.records) <= 11
    one.close()


def test_too_many_requests_that_wait_are_refused(bench: Bench) -> None:
    client = bench.client(0)
    for clock in range(wire.MOST_HELD + 1):
        client.push(0, Push(0, clock, 0, after=1), bytes(12))
    client.pull(1, Sink(), shards=[1])
    with pytest.raises(WireError, match="wait already"):
        receive([client], within(5))


def test_an_error_in_the_memory_is_told_to_the_one_who_asked(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    client = bench.client(0)
    bench.memory.fault = ZeroDivisionError("lr is 0")
    client.push(0, Push(0, 1, 0), bytes(12))
    with pytest.raises(WireError, match="the server failed with ZeroDivisionError: lr is 0"):
        fetch(client)
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].exc_info
    bench.memory.fault = None
    works(bench)
    client.push(0, Push(0, 1, 0), bytes(12))
    assert fetch(client).got[0][:2] == (2, 2)


# Misuse, keys, addresses


def test_misuse_is_named(bench: Bench) -> None:
    client = bench.client(0)
    with pytest.raises(RuntimeError, match=r"call claim\(\) before ticket"):
        client.ticket(within(1))
    client.claim(1)
    with pytest.raises(RuntimeError, match="a claim is under way"):
        client.claim(1)
    with pytest.raises(ValueError, match=r"shard 1 of tcp://\S+ takes 4000 bytes of gradient; got 12"):
        client.push(1, Push(0, 1, 0), bytes(12))
    with pytest.raises(ValueError, match=r"no shard 2: tcp://\S+ has 2"):
        client.pull(0, Sink(), shards=[2])
    with pytest.raises(OSError, match=r"203\.0\.113\.9 is no address"):
        Server(bench.memory, KEYS, GENERATION, range(4), "203.0.113.9")


def test_keys_travel_as_text_and_stay_out_of_messages() -> None:
    assert Keys.from_text(KEYS.to_text()) == KEYS
    assert KEYS.secret not in repr(KEYS)
    for text in ("", KEYS.public, KEYS.to_text()[:-1], f"{KEYS.public} {Keys.make().secret}", "é é"):
        with pytest.raises(ValueError, match="no key pair") as caught:
            Keys.from_text(text)
        assert KEYS.secret not in str(caught.value)


def test_a_server_is_reached_at_its_own_address_only(bench: Bench) -> None:
    port = int(bench.server.address.rpartition(":")[2])
    assert bench.server.address == f"tcp://127.0.0.1:{port}"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_the_address_is_the_one_that_leads_to_the_others() -> None:
    assert bind_address(("127.0.0.1", 29500)) == "127.0.0.1"
    with pytest.raises(ConnectionError, match=r"leads to no\.such\.host\.invalid:1"):
        bind_address(("no.such.host.invalid", 1))


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this host has no IPv6")
def test_ipv6() -> None:
    at = bind_address(("::1", 29500))
    server = Server(Memory(), KEYS, GENERATION, range(4), at)
    assert server.address.startswith("tcp://[::1]:")
    client = Client(server.address, server.public, KEYS, GENERATION, 0)
    client.ready(within(5))
    client.close()
    server.close()
