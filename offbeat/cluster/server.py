"""Serves one host's shards to the workers of other hosts: see `wire.py`."""

from __future__ import annotations

import contextlib
import hmac
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Container, Generator, Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from offbeat.cluster.wire import (
    CHUNK,
    LOOK,
    MAGIC,
    MOST_CLAIMED,
    MOST_HELD,
    MOST_MISSING,
    MOST_SETTINGS,
    NOTHING,
    NUMBER,
    PULL,
    PUSH,
    REPLY,
    REQUEST,
    SIZES,
    VERSION,
    Bytes,
    Keys,
    Kind,
    Refused,
    Served,
    chunks,
    configure,
    fields,
    joined,
    log,
)
from offbeat.shard import Push


@dataclass
class _Session:
    """A worker that has said hello. due: number of its next request; told: the alarm in its last reply."""

    member: int
    due: int = 1
    told: int = 0
    claimed: tuple[int, int] = (0, 0)  # its last claim's number and answer
    applied: dict[int, int] = field(default_factory=dict)  # version right after its last push, by shard
    refused: dict[int, bytes] = field(default_factory=dict)  # why, by number; the latest few


@dataclass
class _Waiting:
    """A push, or a pull where `push` is None, that has not been done yet."""

    number: int
    after: float
    push: Push | None = None
    data: Sequence[memoryview] = ()
    narrow: bool = False
    note: bool = False


class Server:
    """Serves one host's shards to the workers of other hosts, in a daemon thread.

    keys: the job's. generation: which start of the shards this is; messages of another are refused.
    members: ranks that may come. at: the address to bind (`bind_address`); the port is any free one.
    Raises OSError where it cannot be bound.

    A client needs `address` ("tcp://10.77.0.1:40123") and `public`, this server's own public key.
    """

    def __init__(self, memory: Served, keys: Keys, generation: int, members: Container[int], at: str):
        self._memory, self._generation, self.members = memory, generation, members
        self._key, own = z85.decode(keys.public), Keys.make()
        self.public = own.public
        self._sessions: dict[bytes, _Session] = {}
        self._queues: dict[tuple[bytes, int], deque[_Waiting]] = {}
        self._lines: deque[float] = deque()  # when the last lines were logged
        self._unsaid = 0
        largest = max((memory.gradient_bytes(shard) for shard in range(memory.count)), default=0)
        self._scratch = memoryview(bytearray(largest))
        self._context = zmq.Context()
        self._door = self._context.socket(zmq.REP)
        self._door.bind("inproc://zeromq.zap.01")  # where libzmq asks who may come in
        self._router = self._context.socket(zmq.ROUTER)
        configure(
            self._router,
            curve_server=1,
            ipv6=":" in at,
            curve_secretkey=own.secret.encode(),
            zap_domain=b"offbeat",
            zap_enforce_domain=1,  # without an answer from the door nobody comes in
            router_mandatory=1,  # a reply that finds nobody says so
            router_handover=1,  # a worker that comes again takes over from the connection it has lost
            rcvhwm=16,
            sndhwm=1000 + 4 * memory.count,  # of small and large replies; a client asks for far fewer
            backlog=1024,
            maxmsgsize=2 * CHUNK + MOST_MISSING + 8 * MOST_SETTINGS,
        )
        self._watch = self._router.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        try:
            self._router.bind(f"tcp://{f'[{at}]' if ':' in at else at}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"{at} is no address that this host can serve at: {error}") from error
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="offbeat-shards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and frees the port; replies under way are lost. May be called twice."""
        if self._context.closed:
            return
        self._wake.send(b"")
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            log.error("%s: the memory does not return from a call; its server was left behind", self.address)
            return
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._router, self._door, self._watch, self._woken):
            poller.register(one, zmq.POLLIN)
        while True:
            try:
                ready = dict(poller.poll(LOOK if self._queues else None))
                if self._woken in ready:
                    return
                if self._door in ready:
                    self._admit(self._door.recv_multipart())
                if self._watch in ready:
                    self._watch.recv_multipart()
                    self._say("%s: dropped a connection that does not speak as a worker", self.address)
                if self._router in ready:
                    self._receive()
                for who, shard in list(self._queues):
                    self._advance(who, shard)
                if self._queues:
                    self._spread_alarm()
            except Exception:
                self._say("%s: goes on after an error", self.address, exc_info=True)
                time.sleep(0.01)

    def _say(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Logs a warning; of more than ten in ten seconds only the number."""
        now = time.monotonic()
        while self._lines and now - self._lines[0] > 10:
            self._lines.popleft()
        if len(self._lines) == 10:
            self._unsaid += 1
            return
        self._lines.append(now)
        if self._unsaid:
            log.warning("%s: %d lines more like the ones before", self.address, self._unsaid)
            self._unsaid = 0
        log.warning(text, *values, exc_info=exc_info)

    def _admit(self, frames: Sequence[bytes]) -> None:
        """Answers libzmq's question (ZeroMQ RFC 27) whether the holder of a key may come in."""
        version, number, _, address, _, mechanism, *credentials = frames
        key = credentials[0] if mechanism == b"CURVE" and credentials else b""
        known = hmac.compare_digest(key, self._key)
        if not known:
            self._say("%s: %s has not this job's key", self.address, address.decode(errors="replace"))
        status = [b"200", b"OK"] if known else [b"400", b"not this job's key"]
        self._door.send_multipart([version, number, *status, b"", b""])

    # Requests

    def _receive(self) -> None:
        """Takes what has come, a few messages at a time."""
        for _ in range(32):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            who, head = frames[0].bytes, frames[1].buffer if len(frames) > 1 else memoryview(b"")
            if head.nbytes < REQUEST.size or head[:4] != MAGIC:
                self._say("%s: dropped a message that is no request", self.address)
                continue
            with self._answering(who, REQUEST.unpack_from(head)[-1]):
                self._take(who, head, [frame.buffer for frame in frames[2:]])

    @contextlib.contextmanager
    def _answering(self, who: bytes, number: int) -> Generator[None, None, None]:
        """What goes wrong inside is logged and told to whoever asked; nobody else notices."""
        try:
            yield
        except Exception as error:
            bug, why = not isinstance(error, Refused), str(error)
            if bug:
                why = f"the server failed with {type(error).__name__}: {error}"
            session = self._sessions.get(who)
            rank = "a stranger" if session is None else f"rank {session.member}"
            self._say("%s: a request of %s: %s", self.address, rank, why, exc_info=bug)
            text = why.encode(errors="replace")[:1000]
            if session is not None:
                session.refused[number] = text
                if len(session.refused) > 64:
                    del session.refused[next(iter(session.refused))]
            self._send(who, Kind.ERROR, number, 0, text)

    def _take(self, who: bytes, head: memoryview, data: Sequence[memoryview]) -> None:
        _, version, code, shard, generation, number = REQUEST.unpack_from(head)
        if version != VERSION:
            raise Refused(f"it has format {version} and not {VERSION}: install one Offbeat on all hosts")
        if generation != self._generation:
            raise Refused(f"it is of generation {generation}, these shards are of {self._generation}")
        if code not in range(Kind.HELLO, Kind.NOTE):
            raise Refused(f"kind {code} is no request")
        kind, body = Kind(code), head[REQUEST.size :]
        if data and kind != Kind.PUSH:
            raise Refused(f"{kind.name} with a block of bytes")
        session = self._sessions.get(who) or self._welcome(who, kind, number, body)
        if number > session.due:
            return  # those before it were lost with a connection: all of them will be sent again
        if number == session.due:
            session.due += 1
        elif not self._again(who, session, kind, shard, number):
            return
        if kind not in (Kind.PUSH, Kind.PULL):
            self._answer(who, session, kind, number, body)
            return
        if shard >= self._memory.count:
            raise Refused(f"there is no shard {shard}: this host has {self._memory.count}")
        if kind == Kind.PUSH:
            waiting = self._read_push(session, shard, number, body, data)
        else:
            after, note = fields(PULL, body)
            waiting = _Waiting(number, after, note=note)
        if math.isnan(waiting.after):
            raise Refused(f"{kind.name} after nan")
        queue = self._queues.setdefault((who, shard), deque())
        if queue and queue[-1].push is waiting.push is None:  # the client has given up the earlier one
            self._send(who, Kind.NOTE, queue.pop().number)
        if len(queue) >= MOST_HELD:
            raise Refused(f"{len(queue)} requests to shard {shard} wait already")
        queue.append(waiting)
        self._advance(who, shard)

    def _welcome(self, who: bytes, kind: Kind, number: int, body: memoryview) -> _Session:
        if kind != Kind.HELLO or number != 1:
            raise Refused(f"{kind.name} of a worker that has not said hello, or that another has replaced")
        (member,) = fields(NUMBER, body)
        if member not in self.members:
            raise Refused(f"rank {member} is no member")
        for old in [one for one, session in self._sessions.items() if session.member == member]:
            del self._sessions[old]
            for key in [key for key in self._queues if key[0] == old]:
                del self._queues[key]
        session = self._sessions[who] = _Session(member)
        return session

    def _again(self, who: bytes, session: _Session, kind: Kind, shard: int, number: int) -> bool:
        """A request that has come before. Returns whether to do it again: one that changes nothing."""
        if any(waiting.number == number for waiting in self._queues.get((who, shard), ())):
            return False
        if number in session.refused:
            self._send(who, Kind.ERROR, number, 0, session.refused[number])
        elif kind in (Kind.HELLO, Kind.PULL, Kind.BUFFERS):
            return True
        elif kind == Kind.PUSH:
            self._send(who, kind, number, shard, NUMBER.pack(session.applied.get(shard, 0)))
        elif kind != Kind.CLAIM:
            self._send(who, kind, number)
        elif session.claimed[0] == number:  # an earlier one's answer has arrived, or this would not be here
            self._send(who, kind, number, 0, NUMBER.pack(session.claimed[1]))
        return False

    def _answer(self, who: bytes, session: _Session, kind: Kind, number: int, body: memoryview) -> None:
        """Does what isn't about one shard."""
        memory = self._memory
        answer: list[Bytes] = [b""]
        if kind == Kind.HELLO:
            fields(NUMBER, body)
            shards = range(memory.count)
            whole, narrow = ([memory.gradient_bytes(s, narrow=n) for s in shards] for n in (False, True))
            sizes = zip(whole, narrow, map(memory.parameter_bytes, shards), strict=True)
            answer = [b"".join(SIZES.pack(*one) for one in sizes)]
        elif kind == Kind.CLAIM:
            (count,) = fields(NUMBER, body)
            if not 1 <= count <= MOST_CLAIMED:
                raise Refused(f"a claim of {count} units: 1 to {MOST_CLAIMED} at a time")
            session.claimed = number, memory.claim(session.member, count)
            answer = [NUMBER.pack(session.claimed[1])]
        elif kind == Kind.ALARM:
            (memory.alarm,) = fields(NUMBER, body)
        else:
            fields(NOTHING, body)
            if kind == Kind.REST:
                memory.rest(session.member)
            else:
                answer = [b"", memory.buffers()]
        self._send(who, kind, number, 0, *answer)

    # Pushes and pulls

    def _read_push(
        self, session: _Session, shard: int, number: int, body: memoryview, data: Sequence[memoryview]
    ) -> _Waiting:
        if body.nbytes < PUSH.size:
            raise Refused(f"a push with {body.nbytes} bytes of fields")
        member, clock, seen, after, damped, narrow, settings, missing = PUSH.unpack_from(body)
        bitmap = PUSH.size + 8 * settings
        if body.nbytes != bitmap + missing or settings > MOST_SETTINGS or missing > MOST_MISSING:
            raise Refused(
                f"a push of {settings} settings and {missing} bytes of bitmap in {body.nbytes} bytes"
            )
        if member != session.member or clock < 0 or seen < 0:
            raise Refused(f"rank {session.member} pushes as rank {member}, clock {clock}, version {seen}")
        wanted = self._memory.gradient_bytes(shard, narrow=narrow)
        size = sum(chunk.nbytes for chunk in data)
        if size != wanted:
            raise Refused(f"{size} bytes of gradient for shard {shard}, which takes {wanted}")
        values = struct.unpack_from(f"<{settings}d", body, PUSH.size)
        push = Push(member, clock, seen, after, damped, values, bytes(body[bitmap:]))
        return _Waiting(number, after, push, data, narrow)

    def _advance(self, who: bytes, shard: int) -> None:
        """Does what may be done of one client's requests to a shard, in their order."""
        queue, session, memory = self._queues[who, shard], self._sessions[who], self._memory
        while queue:
            waiting = queue[0]
            push, after, number = waiting.push, waiting.after, waiting.number
            with self._answering(who, number):
                if not (memory.may_push if push else memory.may_pull)(shard, after):
                    return
                queue.popleft()
                if push:
                    data = joined(waiting.data, self._scratch)
                    version = memory.apply(shard, push, data, waiting.narrow)
                    session.applied[shard] = version
                    self._send(who, Kind.PUSH, number, shard, NUMBER.pack(version))
                else:
                    member = session.member if waiting.note else None
                    version, parameters = memory.snapshot(shard, member)
                    self._send(who, Kind.PULL, number, shard, NUMBER.pack(version), parameters)
            if queue and queue[0] is waiting:
                queue.popleft()  # it could not even be asked whether it may
        del self._queues[who, shard]

    def _spread_alarm(self) -> None:
        """Tells those that are held back of an alarm: no reply would."""
        for who in {who for who, _ in self._queues}:
            if self._sessions[who].told != self._memory.alarm:
                self._send(who, Kind.NOTE, 0)

    def _send(
        self, who: bytes, kind: Kind, number: int, shard: int = 0, body: Bytes = b"", data: Bytes = b""
    ) -> None:
        """Sends a reply without waiting. A worker whose connection is lost will ask again."""
        alarm = self._memory.alarm
        head = REPLY.pack(MAGIC, VERSION, kind, shard, self._generation, number, alarm)
        try:
            self._router.send_multipart([who, head + body, *chunks(data)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
        else:
            if who in self._sessions:
                self._sessions[who].told = alarm
