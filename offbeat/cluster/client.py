"""A worker's way to the shards of another host: see `wire.py`."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from offbeat.cluster.wire import (
    CHECK,
    JOINED,
    MAGIC,
    NUMBER,
    PULL,
    PUSH,
    REPLY,
    REQUEST,
    SIZES,
    TROUBLES,
    VERSION,
    Bytes,
    Check,
    Keys,
    Kind,
    Sink,
    WireError,
    chunks,
    configure,
    joined,
)
from offbeat.shard import Push


class Client:
    """A worker's way to the shards of one other host. To be used from one thread.

    address, public: the server's. keys: the job's. generation: the server's too. member: this worker's rank.
    It starts connecting at once; `ready` waits for it. Calls that wait call `check` about five times a
    second, and at once for an alarm; it may raise. They raise WireError for what the server
    refused or could not do.

    `count` is the number of the host's shards, 0 before `ready`; `alarm` is the host's, as of its last word.
    """

    def __init__(self, address: str, public: str, keys: Keys, generation: int, member: int):
        self.address, self.count, self.alarm = address, 0, 0
        self._generation, self._number = generation, 0
        self._window: dict[int, list[Bytes]] = {}  # requests without an answer, by number
        self._unsent: deque[int] = deque()
        self._pulls: dict[int, tuple[int, Sink]] = {}  # by shard: the last pull's number, and where it goes
        self._applied: dict[int, int] = {}
        self._sizes: list[tuple[int, ...]] = []
        self._scratch = memoryview(b"")
        self._claim, self._ticket, self._buffers = 0, 0, b""
        self._joined, self._trouble = False, "nobody answers there"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(
            self._socket,
            ipv6="[" in address,
            curve_serverkey=public.encode(),
            curve_publickey=keys.public.encode(),
            curve_secretkey=keys.secret.encode(),
            routing_id=b"w" + os.urandom(15),
            immediate=1,  # while there is no connection, requests wait in the window
            connect_timeout=5000,
            reconnect_ivl=100,
            reconnect_ivl_max=2000,
        )
        self._watch = self._socket.get_monitor_socket(JOINED | sum(TROUBLES))
        self._socket.connect(address)
        self._ask(Kind.HELLO, 0, NUMBER.pack(member))

    def close(self) -> None:
        """Drops the connection and what is under way (see `flush`). May be called twice."""
        self._context.destroy(linger=0)

    def ready(self, check: Check, patience: float = 60.0) -> None:
        """Waits until the server has let this worker in.

        Raises ConnectionError when it has not within `patience` seconds."""
        end = time.monotonic() + patience

        def known() -> bool:
            if 1 in self._window and time.monotonic() > end:
                raise ConnectionError(f"no shards at {self.address} in {patience:g} s: {self._trouble}")
            return 1 not in self._window

        _wait([self], known, check)

    def claim(self, count: int) -> None:
        """Asks for the next `count` unit numbers; `ticket` waits for the answer. Claim before pushing: a
        request doesn't overtake the gradients before it. Raises RuntimeError while a claim is under way."""
        if self._claim:
            raise RuntimeError("a claim is under way: take its ticket() before the next claim()")
        self._claim = self._ask(Kind.CLAIM, 0, NUMBER.pack(count))

    def ticket(self, check: Check) -> int:
        """The first of the claimed unit numbers. Raises RuntimeError without a claim."""
        if not self._claim:
            raise RuntimeError("no claim is under way: call claim() before ticket()")
        _wait([self], lambda: self._claim not in self._window, check)
        self._claim = 0
        return self._ticket

    def push(self, shard: int, push: Push, data: Bytes, narrow: bool = False) -> None:
        """Sends a gradient on its way (`narrow`: in bfloat16); the version it leads to comes with the next
        pull.

        It is sent from where it lies: `data` must not change until the shard's next pull has come, or
        `flush` has returned. Raises ValueError for a size that isn't the shard's."""
        size, data = self._shard(shard)[narrow], memoryview(data)
        if data.nbytes != size:
            raise ValueError(
                f"shard {shard} of {self.address} takes {size} bytes of gradient; got {data.nbytes}"
            )
        body = PUSH.pack(
            *(push.member, push.clock, push.seen, push.after, push.damped, narrow),
            *(len(push.settings), len(push.missing)),
        )
        settings = struct.pack(f"<{len(push.settings)}d", *push.settings)
        self._ask(Kind.PUSH, shard, body + settings + push.missing, data)

    def pull(self, after: float, sink: Sink, shards: Iterable[int] | None = None, note: bool = True) -> None:
        """Asks for the parameters of `shards` (None: all), each as soon as every member's clock is at least
        `after` there; `receive` gives them to `sink(shard, version, applied, data)`, where `applied` is the
        version right after this worker's last push to the shard (0: none). `data` is good during that call.

        note: whether it counts as having taken parameters. A shard's earlier pull that has not come yet is
        forgotten."""
        for shard in range(self.count) if shards is None else shards:
            self._shard(shard)
            self._pulls[shard] = self._ask(Kind.PULL, shard, PULL.pack(after, note)), sink

    def buffers(self, check: Check) -> bytes:
        """What the host's members have published of their buffers."""
        number = self._ask(Kind.BUFFERS)
        _wait([self], lambda: number not in self._window, check)
        return self._buffers

    def rest(self) -> None:
        """Nobody waits for this worker at a bound until its next push."""
        self._ask(Kind.REST)

    def raise_alarm(self, value: int) -> None:
        """Sets the host's alarm, for its own workers and all clients; 0 takes it back."""
        self._ask(Kind.ALARM, 0, NUMBER.pack(value))

    def _shard(self, shard: int) -> tuple[int, ...]:
        if not 0 <= shard < self.count:
            raise ValueError(f"no shard {shard}: {self.address} has {self.count} (0 before ready())")
        return self._sizes[shard]

    def _ask(self, kind: Kind, shard: int = 0, body: bytes = b"", data: Bytes = b"") -> int:
        self._number += 1
        head = REQUEST.pack(MAGIC, VERSION, kind, shard, self._generation, self._number)
        self._window[self._number] = [head + body, *chunks(data)]
        self._unsent.append(self._number)
        self._send()
        return self._number

    def _send(self) -> None:
        """Hands over what ZeroMQ takes now: nothing while there is no connection."""
        while self._unsent:
            frames = self._window.get(self._unsent[0])
            try:
                if frames is not None:
                    self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._unsent.popleft()

    def progress(self, poller: zmq.Poller) -> None:
        """Sends and takes what is possible without waiting; `poller` is to tell when there is more."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._notice(parse_monitor_message(self._watch.recv_multipart(zmq.NOBLOCK))["event"])
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        self._send()
        poller.register(self._watch, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0))

    def _notice(self, event: int) -> None:
        self._trouble = TROUBLES.get(event, self._trouble)
        if event != JOINED:
            return
        if self._joined:
            self._socket.get(zmq.EVENTS)  # or libzmq might not know yet that the old connection is gone
            self._unsent = deque(self._window)
        self._joined = True

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        head, data = frames[0].buffer, [frame.buffer for frame in frames[1:]]
        if head.nbytes < REPLY.size or head[:4] != MAGIC or head[4] != VERSION:
            raise WireError(f"{self.address} speaks another format: install one Offbeat on all hosts")
        _, _, kind, shard, _, number, self.alarm = REPLY.unpack_from(head)
        body = bytes(head[REPLY.size :])
        if self._window.pop(number, None) is None:
            return  # it answers nothing, or what was answered before a connection broke
        if kind == Kind.ERROR:
            self._pulls = {at: pull for at, pull in self._pulls.items() if pull[0] != number}
            if self._claim == number:
                self._claim = 0
            raise WireError(f"{self.address}: {body.decode(errors='replace')}")
        try:
            if kind == Kind.HELLO:
                self._sizes = list(SIZES.iter_unpack(body))
                self.count = len(self._sizes)
                self._scratch = memoryview(bytearray(max((size[2] for size in self._sizes), default=0)))
            elif kind == Kind.CLAIM:
                (self._ticket,) = NUMBER.unpack(body)
            elif kind == Kind.PUSH:
                (self._applied[shard],) = NUMBER.unpack(body)
            elif kind == Kind.BUFFERS:
                self._buffers = b"".join(data)
            elif kind == Kind.PULL:
                (version,) = NUMBER.unpack(body)
                size = sum(chunk.nbytes for chunk in data)
                if size != self._sizes[shard][2]:
                    raise ValueError(f"{size} bytes of parameters")
        except (struct.error, ValueError, IndexError) as error:
            raise WireError(f"{self.address} sent a malformed reply of kind {kind}: {error}") from error
        if kind == Kind.PULL and self._pulls.get(shard, (0,))[0] == number:
            self._pulls.pop(shard)[1](
                shard, version, self._applied.get(shard, 0), joined(data, self._scratch)
            )


def receive(clients: Sequence[Client], check: Check) -> None:
    """Waits until the pulls of all clients have come, and gives each to its sink as it does.

    All at once and not one after the other: what one host holds back may depend on what another has yet to
    be sent."""
    _wait(clients, lambda: not any(client._pulls for client in clients), check)


def flush(clients: Sequence[Client], check: Check) -> None:
    """Waits until every request of the clients has been done and answered: a push, applied."""
    _wait(clients, lambda: not any(client._window for client in clients), check)


def _wait(clients: Sequence[Client], done: Callable[[], bool], check: Check) -> None:
    poller, checked = zmq.Poller(), time.monotonic()
    alarms = [0] * len(clients)
    while True:
        for client in clients:
            client.progress(poller)
        if done():
            return
        now, heard = time.monotonic(), [client.alarm for client in clients]
        if now - checked >= CHECK or heard != alarms:
            checked, alarms = now, heard
            check()
        poller.poll(int(CHECK * 1000))
