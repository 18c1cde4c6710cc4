"""Shards in shared memory, with real processes that are really killed, and behind the wire."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.cluster.client import Client, flush
from offbeat.cluster.memory import Memory, drop_file, end_of, make_file, open_file
from offbeat.cluster.server import Server
from offbeat.cluster.wire import Keys
from offbeat.cut import cut
from offbeat.outline import Outline
from offbeat.shard import Push
from offbeat.twin import Settings, slots
from tests.forks import context

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
}
MEMBERS = 5


def attach(
    path: str, kind: str, size: int, shards: int, clients: int, client: int, first: bool = False
) -> tuple[Memory, Settings]:
    """One process's view. The model is one vector of zeros, every gradient is ones: so all elements of a
    shard are equal at any time, unless a push was applied by half."""
    p = nn.Parameter(torch.zeros(size))
    optimizer = KINDS[kind]([p])
    outlines = [
        Outline(
            one, lambda q: slots(optimizer, 0, (2,), q.dtype, "elements"), "elements", MEMBERS, clients + 1
        )
        for one in cut([p], [optimizer], shards, "elements")
    ]
    settings = Settings([optimizer])
    memory = Memory(path, 0, outlines, [optimizer], settings, clients, client, 1, 64, first)
    if first:
        memory.begin(0, range(MEMBERS), 0)
        for shard in range(shards):
            memory.load(shard, [p], [optimizer])
    return memory, settings


def push(memory: Memory, settings: Settings, clock: int) -> None:
    for shard in range(memory.count):
        memory.gradient(shard).region.view(torch.float32).fill_(1)
    seen = [memory.current(shard).version for shard in range(memory.count)]
    memory.commit(Push(memory.client, clock, 0, settings=settings.read()), seen)
    memory.finish()


def whole(memory: Memory) -> None:
    """Every shard holds every committed push, whole."""
    committed = [int(n) for n in memory._committed[: memory.clients]]
    states: list[list[Tensor]] = []
    for number in range(memory.count):
        shard = memory.current(number)
        assert shard.extra[: memory.clients].tolist() == committed
        assert shard.pushes[: memory.clients].tolist() == committed
        assert shard.version == sum(committed)
        values: list[Tensor] = []
        shard.store(lambda piece, slot, tensor, values=values: values.append(tensor.clone()))
        for tensor in values:
            assert bool((tensor == tensor.reshape(-1)[0]).all())
        states.append([tensor.reshape(-1)[:1] for tensor in values])
    for state in states:  # the same pushes with the same gradients
        assert all(torch.equal(a, b) for a, b in zip(state, states[0], strict=True))


def in_a_process(function: Callable[..., None], *args: Any, timeout: float = 60) -> None:
    """Runs it where forking is safe; raises what it says."""
    mine, theirs = context.Pipe()
    process = context.Process(target=_report, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        assert mine.poll(timeout), "it hangs"
        error = mine.recv()
    finally:
        process.kill()
        process.join()
    assert error is None, error


def _report(pipe: Any, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    import traceback

    torch.set_num_threads(1)
    try:
        function(*args)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


def fork(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(1)
    return pid


def kills(kind: str, count: int, size: int, shards: int) -> None:
    """Client 0 is killed at a random instant while client 1 pushes on; then all must be whole."""
    at_random, unfinished, partly = random.Random(7), 0, 0
    path = make_file()
    memory, settings = attach(path, kind, size, shards, 2, 0, first=True)
    warm = time.perf_counter()
    push(memory, settings, 1)
    warm = time.perf_counter() - warm
    for _ in range(count):
        memory.alarm = 0
        before = memory._committed.copy()

        def pushes(client: int, until: Callable[[], bool]) -> None:
            own, mine = attach(path, kind, size, shards, 2, client)
            clock = int(own._committed[client])
            while not until():
                clock += 1
                push(own, mine, clock)
            os._exit(0)

        victim = fork(lambda: pushes(0, lambda: False))
        other = fork(lambda: pushes(1, lambda: memory.alarm != 0))
        while min(memory._committed[:2] - before[:2]) < 2:
            time.sleep(0.0005)
        time.sleep(at_random.random() * 8 * warm)
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        applied = {int(memory.current(s).extra[0]) for s in range(shards)}
        partly += len(applied) > 1
        unfinished += min(applied) < int(memory._committed[0])
        killed_at = int(memory._committed[1])
        while memory._committed[1] < killed_at + 3:  # the rest goes on
            time.sleep(0.0005)
        memory.alarm = 1
        assert os.waitpid(other, 0)[1] == 0
        for shard in range(shards):  # whoever comes next finishes what is committed
            memory.pull(shard, None, lambda now: None)
        whole(memory)
        # It was the dead one's push or it wasn't: what it had committed is there, and nothing else.
        assert memory.current(0).clock[0] == memory._committed[0]
    print(f"{count} kills: {partly} found on some shards only, {unfinished} committed and unfinished")


def test_100_kills_in_the_middle_of_a_push() -> None:
    in_a_process(kills, "sgd", 100, 40_000, 4)


def test_kills_with_an_optimizer_that_steps_in_place() -> None:
    in_a_process(kills, "adam", 30, 20_000, 3)


def counting(pushes: int, clients: int) -> None:
    path = make_file()
    memory, _ = attach(path, "sgd", 600, 2, clients, 0, first=True)

    def work(client: int) -> None:
        own, settings = attach(path, "sgd", 600, 2, clients, client)
        for clock in range(1, pushes + 1):
            push(own, settings, clock)
        os._exit(0)

    pids = [fork(lambda client=client: work(client)) for client in range(clients)]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    for shard in range(2):
        assert memory.current(shard).version == pushes * clients
    whole(memory)


def test_20000_pushes_of_4_workers_are_20000_updates() -> None:
    in_a_process(counting, 5000, 4)


def counting_over_the_wire(pushes: int, clients: int) -> None:
    keys = Keys.make()
    path = make_file()
    memory, _ = attach(path, "sgd", 600, 2, 1, 0, first=True)
    server = Server(memory, keys, 1, range(MEMBERS), "127.0.0.1")

    def work(rank: int) -> None:
        p = nn.Parameter(torch.zeros(600))
        settings = Settings([KINDS["sgd"]([p])])
        client = Client(server.address, server.public, keys, 1, rank)
        client.ready(lambda: None)
        ones = [memoryview(torch.ones(size // 4).view(torch.uint8).numpy()) for size, *_ in client._sizes]
        for clock in range(1, pushes + 1):
            for shard in range(2):
                client.push(shard, Push(rank, clock, 0, settings=settings.read()), ones[shard])
            if clock % 6 == 0:
                flush([client], lambda: None)
        flush([client], lambda: None)
        os._exit(0)

    pids = [fork(lambda rank=rank: work(rank)) for rank in range(1, clients + 1)]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    server.close()
    for shard in range(2):
        now = memory.current(shard)
        assert now.version == pushes * clients
        assert now.pushes[1 : clients + 1].tolist() == [pushes] * clients
        assert now.extra.tolist() == [0, pushes * clients]
        values = now.parameters[0]
        assert bool((values == values[0]).all())


def test_20000_pushes_over_the_wire_are_20000_updates() -> None:
    in_a_process(counting_over_the_wire, 5000, 4)


def dealing(count: int, workers: int) -> None:
    path = make_file()
    attach(path, "sgd", 64, 1, workers, 0, first=True)
    pipes = []
    for client in range(workers):
        read, write = os.pipe()

        def work(client: int = client, write: int = write) -> None:
            own, _ = attach(path, "sgd", 64, 1, workers, client)
            mine = [own.claim(0) for _ in range(count)]
            os.write(write, " ".join(map(str, mine)).encode())
            os._exit(0)

        fork(work)
        os.close(write)
        pipes.append(read)
    dealt: list[int] = []
    for pipe in pipes:
        text = b""
        while piece := os.read(pipe, 65536):
            text += piece
        dealt += map(int, text.split())
    assert sorted(dealt) == list(range(count * workers))


def test_every_unit_is_dealt_once() -> None:
    in_a_process(dealing, 2000, 3)


def test_memory_that_there_is_not_is_said() -> None:
    path = make_file()
    with pytest.raises(OSError, match=r"shards need 16,777,216 MB of memory .* MB are available"):
        Memory(path, 0, [], [], Settings([]), 1, 0, 1, 1 << 44, first=True)
    drop_file(path)


def test_room_is_used_again() -> None:
    path = make_file()
    memory, _ = attach(path, "sgd", 600, 2, 1, 0, first=True)
    assert end_of(path) == memory.size
    memory.release()
    assert end_of(path) == 0
    assert open_file(path) == memory.fd
    drop_file(path)
