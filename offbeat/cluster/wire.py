"""How a worker reaches the shards of other hosts: requests and replies over ZeroMQ.

Each host whose shards others need runs one `Server`, a thread over that host's memory; each worker holds
one `Client` per other host. Rules that hold here:

- Only holders of the job's key may connect, and a client knows whose server it talks to (CURVE: encrypted
  and authenticated both ways). What cannot prove the key never reaches this code.
- A message is a fixed header, fixed fields and at most one block of bytes, in chunks. Nothing is unpickled,
  and every field and size is checked before anything is done.
- A client's requests are numbered, taken in their order, each done once and each answered. When a
  connection breaks, the client sends again what was not answered, and the server knows what it has done.
- What a bound holds back (`after`) waits in the server, in one queue per client and shard: it holds up
  neither other clients nor other shards. A pull comes after the same client's earlier pushes to its shard.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import zmq

from offbeat.shard import Push

log = logging.getLogger("offbeat.wire")

MAGIC, VERSION = b"OFFB", 1
CHECK = 0.2  # seconds between two calls of `check` while a client waits
LOOK = 1  # ms between two looks at what is held back: the host's own members move without a message
CHUNK = 1 << 19  # bytes that are encrypted, sent and decrypted at a time: the next ones' turn overlaps
MOST_SETTINGS, MOST_MISSING, MOST_CLAIMED, MOST_HELD = 4096, 1 << 20, 1 << 20, 16

REQUEST = struct.Struct("<4sBBxxIQQ")  # magic, version, kind, shard, generation, number
REPLY = struct.Struct("<4sBBxxIQQq")  # the same, alarm
NOTHING, NUMBER = struct.Struct(""), struct.Struct("<q")
PULL = struct.Struct("<d?")  # after, note
PUSH = struct.Struct("<iqqd??II")  # member, clock, seen, after, damped, narrow, settings, bytes of missing
SIZES = struct.Struct("<QQQ")  # of a shard, in bytes: gradient, narrow gradient, parameters

JOINED: int = zmq.EVENT_HANDSHAKE_SUCCEEDED
TROUBLES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not let this worker's key in",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what answers there is not this job's server",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it broke the connection off: not this job's server, or overloaded",
}

Bytes = bytes | bytearray | memoryview
Check = Callable[[], None]
Sink = Callable[[int, int, int, memoryview], None]


class Kind(IntEnum):
    """A reply has its request's kind, or is an ERROR. A NOTE brings nothing but the alarm."""

    HELLO = 1
    CLAIM = 2
    PUSH = 3
    PULL = 4
    BUFFERS = 5
    REST = 6
    ALARM = 7
    NOTE = 8
    ERROR = 9


class WireError(RuntimeError):
    """A server refused or could not do a request, or a peer speaks something else."""


class Refused(Exception):
    """Why a request cannot be done, for the log and for its sender."""


class Served(Protocol):
    """One host's shards as a server uses them. All calls come from the server's thread, and none may wait
    for another member."""

    alarm: int  # 0: none

    @property
    def count(self) -> int:
        """Shards on this host."""

    def may_push(self, shard: int, after: float) -> bool:
        """Whether every member has taken parameters at clock `after` or later."""

    def may_pull(self, shard: int, after: float) -> bool:
        """Whether every member's clock is at least `after`."""

    def gradient_bytes(self, shard: int, narrow: bool = False) -> int:
        """Size of a gradient, `narrow`: in bfloat16."""

    def parameter_bytes(self, shard: int) -> int: ...

    def apply(self, shard: int, push: Push, data: memoryview, narrow: bool) -> int:
        """Applies another host's push; returns the version right after it. `data` is good during the call
        only."""

    def snapshot(self, shard: int, member: int | None) -> tuple[int, Bytes]:
        """Version and parameters, in bytes that never change again; notes that `member` has pulled."""

    def claim(self, member: int, count: int) -> int:
        """Deals `count` consecutive unit numbers to a member; returns the first."""

    def rest(self, member: int) -> None:
        """Nobody waits for `member` at a bound until its next push."""

    def buffers(self) -> Bytes:
        """What this host's members have published of their buffers."""


@dataclass(frozen=True)
class Keys:
    """A CURVE key pair in Z85. A job has one, shared by all its workers: holding it lets a worker in."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def make(cls) -> Keys:
        """Raises RuntimeError where pyzmq was built without encryption."""
        if not zmq.has("curve"):
            raise RuntimeError(
                f"pyzmq {zmq.__version__} was built without CURVE, which jobs on several hosts need: "
                f"the wheels on PyPI have it"
            )
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def to_text(self) -> str:
        return f"{self.public} {self.secret}"

    @classmethod
    def from_text(cls, text: str) -> Keys:
        """Raises ValueError, which doesn't repeat the text: it may hold a secret."""
        with contextlib.suppress(ValueError, KeyError, zmq.ZMQError):
            public, secret = text.split(" ")
            if zmq.curve_public(secret.encode()) == public.encode():
                return cls(public, secret)
        raise ValueError(f"{len(text)} characters that are no key pair: it is what Keys.to_text() gives")


def bind_address(towards: tuple[str, int]) -> str:
    """Address of this host's interface that reaches `towards` (host and port); nothing is sent.

    A host whose own name resolves to the loopback gets the loopback: ask it for another host's address.
    Raises ConnectionError where the name is unknown or no route leads there."""
    host, port = towards
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(socket.getnameinfo(probe.getsockname(), socket.NI_NUMERICHOST)[0])
    except OSError as error:
        raise ConnectionError(f"no interface of this host leads to {host}:{port}: {error}") from error


def configure(one: zmq.Socket[bytes], **options: Any) -> None:
    """No ZeroMQ heartbeats: a large message on a slow link outlasts any time-out that would be of use, and
    who is alive is judged elsewhere. TCP's keep-alive ends connections to hosts that are gone."""
    common = {"linger": 0, "tcp_keepalive": 1, "tcp_keepalive_idle": 30, "tcp_keepalive_intvl": 10}
    for name, value in {**common, "tcp_keepalive_cnt": 6, **options}.items():
        one.set(getattr(zmq, name.upper()), value)


def fields(layout: struct.Struct, body: memoryview) -> tuple[Any, ...]:
    if body.nbytes != layout.size:
        raise Refused(f"{body.nbytes} bytes of fields instead of {layout.size}")
    return layout.unpack(body)


def chunks(data: Bytes) -> list[memoryview]:
    flat = memoryview(data)
    if not flat.nbytes:
        return []
    flat = flat.cast("B")
    return [flat[at : at + CHUNK] for at in range(0, flat.nbytes, CHUNK)]


def joined(chunks: Sequence[memoryview], scratch: memoryview) -> memoryview:
    """The block that was sent in these chunks, copied into `scratch` (aligned, which theirs is not)."""
    at = 0
    for chunk in chunks:
        scratch[at : at + chunk.nbytes] = chunk
        at += chunk.nbytes
    return scratch[:at]
