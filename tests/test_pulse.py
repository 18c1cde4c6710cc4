"""Signs of life that no network stops, and an ear for deaths."""

import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from offbeat.cluster.epoch import Epoch, PeerLost, _bury
from offbeat.cluster.pulse import ENDING, Pulse, Pulses
from offbeat.cluster.roll import Roll
from offbeat.cluster.sizes import IN_FLIGHT


class Board:
    """The job's store as a launcher has it, with a switch that cuts it off."""

    def __init__(self):
        self.keys, self.deaths = set(), 0
        self.reached = threading.Event()
        self.reached.set()

    def add(self, key, amount):
        self.reached.wait()
        return self.deaths

    def check(self, keys):
        self.reached.wait()
        return all(key in self.keys for key in keys)

    def tell_death(self, rank, attempt):
        self.keys.add(f"dead/{rank}/{attempt}")
        self.deaths += 1


class Connections:
    def __init__(self, members):
        self.members, self.closed = members, threading.Event()

    def close(self):
        self.closed.set()


def wait_for(true):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def pulses():
    made = Pulses()
    yield made
    made.close()


def test_signs_of_life_go_on_while_the_network_is_cut(pulses):
    board = Board()
    roll = Roll(HashStore(), board, 1, 0, 2)
    assert pulses.last(1) == 0
    pulse = Pulse(roll, board, 0.04, pulses.path, 1)
    wait_for(lambda: pulses.last(1))
    board.reached.clear()
    for _ in range(3):
        before = pulses.last(1)
        wait_for(lambda before=before: pulses.last(1) > before)
    assert pulses.last(0) == 0
    board.reached.set()
    pulse._stop()
    assert pulses.last(1) == ENDING
    pulses.forget(1)
    assert pulses.last(1) == 0


def test_an_epoch_that_has_lost_a_member_is_closed():
    board = Board()
    roll = Roll(HashStore(), board, 0, 0, 3)
    roll.await_all([0, 1])
    epoch = Connections([0, 1])
    roll.meets(epoch)
    pulse = Pulse(roll, board, 0.04, None, 0)
    board.tell_death(2, 0)  # who is in no epoch of this one's
    board.tell_death(1, 7)  # an earlier process of the rank
    time.sleep(0.1)
    assert not epoch.closed.is_set()
    board.tell_death(1, 0)
    assert epoch.closed.wait(30)
    pulse._stop()


def test_a_death_ends_the_wait_for_an_epoch():
    """The other member never comes; without the ear this would take twelve hours."""
    board = Board()
    roll = Roll(HashStore(), board, 0, 0, 2)
    board.tell_death(1, 0)  # before anybody waits for it: the count alone tells nothing new
    pulse = Pulse(roll, board, 0.04, None, 0)
    roll.await_all([0, 1])
    with pytest.raises(PeerLost, match="has died meanwhile"):
        Epoch(1, [0, 1], 0, HashStore(), torch.device("cpu"), timedelta(hours=12), roll.gone)
    pulse._stop()


def test_who_has_given_up_an_epoch_can_ask_the_store_at_once():
    """What still waits in the store for the dead member is let go, and holds up nobody's connection."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("job", TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False))
    roll = Roll(store, Board(), 0, 0, 2)
    roll.await_all([0, 1])
    before = set(threading.enumerate())
    threading.Timer(0.3, roll.hear_of, (1, 0)).start()
    with pytest.raises(PeerLost, match="has died meanwhile"):
        Epoch(1, [0, 1], 0, store, torch.device("cpu"), timedelta(hours=12), roll.gone)
    asked = threading.Thread(target=store.check, args=(["anything"],), daemon=True)
    asked.start()
    asked.join(30)
    assert not asked.is_alive()
    wait_for(lambda: set(threading.enumerate()) <= before)


def test_an_epoch_of_one_that_died_as_it_came_is_closed_at_once():
    board = Board()
    roll = Roll(HashStore(), board, 0, 0, 2)
    roll.await_all([0, 1])
    roll.hear_of(1, 0)
    epoch = Connections([0, 1])
    roll.meets(epoch)
    assert epoch.closed.is_set()


def test_an_epoch_leaves_connections_that_are_not_its_own_alone():
    """A thread of the user's, such as an uploader's, connects while an epoch forms."""
    store, device, epochs, formed = HashStore(), torch.device("cpu"), {}, threading.Event()
    server = socket.create_server(("127.0.0.1", 0), backlog=1000)
    pairs = []

    def form(rank):
        epochs[rank] = Epoch(1, [0, 1], rank, store, device)

    def connect():
        while not formed.is_set():
            pairs.append((socket.create_connection(server.getsockname()), server.accept()[0]))
            time.sleep(0.001)

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
    user = threading.Thread(target=connect)
    for thread in (user, *threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    formed.set()
    user.join(60)
    assert len(pairs) > 2
    for mine, other in pairs[::2]:
        mine.close()
        other.close()
    for epoch in epochs.values():
        epoch.check()
    epochs[0].close()
    wait_for(lambda: lost(epochs[1]))
    for mine, other in pairs[1::2]:
        mine.sendall(b"!")
        assert other.recv(1) == b"!"
        mine.close()
        other.close()
    server.close()


def formed(size=2):
    """An epoch of threads: its members' ends."""
    store, ends = HashStore(), {}

    def form(rank):
        ends[rank] = Epoch(1, range(size), rank, store, torch.device("cpu"))

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def test_several_buckets_are_under_way_at_a_time(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as torch's own groups understand it
    ends = formed()
    threads = {name: group.options._threads for name, group in ends[0]._groups.items()}
    assert threads == {"control": 2, "gradients": IN_FLIGHT, "averages": 2}
    tensors = {rank: [torch.full((1000,), rank + number) for number in range(20)] for rank in ends}
    works = [ends[rank].sum(tensor, "gradients") for rank in ends for tensor in tensors[rank]]
    for work in works:
        work.wait()
    for both in tensors.values():
        assert [set(tensor.tolist()) for tensor in both] == [{2 * number + 1} for number in range(20)]
    for end in ends.values():
        end.close()


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(PeerLost, match="nosuch0"):
        Epoch(1, [0, 1], 0, HashStore(), torch.device("cpu"))


def lost(epoch):
    try:
        epoch.check()
    except PeerLost:
        return True
    return False


class Stubborn:
    """A group that cannot be collected while somebody holds it up."""

    def __init__(self, collectors):
        self.collectors, self.may = collectors, threading.Event()

    def __del__(self):
        self.collectors.append(threading.current_thread().name)
        self.may.wait(5)


def test_a_group_that_is_not_let_go_holds_up_nobody():
    epoch = Epoch(1, [0], 0, None, torch.device("cpu"))
    _bury()
    collectors: list[str] = []
    group = Stubborn(collectors)
    may = group.may
    epoch._groups = {"control": group}
    del group, epoch
    wait_for(lambda: collectors)
    assert collectors == ["offbeat-burial"]
    may.set()


LATE = """
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore

import offbeat.cluster.epoch
from offbeat.cluster.epoch import Epoch, _bury

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Late:
    def __del__(self, wait=store.wait, seconds=timedelta(seconds=2)):
        try:
            wait(["never"], seconds)  # in C++, as a group's end that waits for another worker's
        except RuntimeError:
            pass


class Busy:
    def __del__(self, sleep=time.sleep):
        sleep(3)  # a machine that takes long to clear the interpreter up


epoch = Epoch(1, [0], 0, None, torch.device("cpu"))
_bury()
epoch._groups = {"control": Late()}
del epoch
offbeat.cluster.epoch.busy = Busy()
"""


def test_a_group_that_is_collected_late_does_not_break_the_interpreters_end():
    """A thread that comes back from C++ into an interpreter that is going ends the process by SIGABRT."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class Impatient:
    """A store that fails a test which would wait for ever."""

    def __init__(self, store, looks=5000):
        self._store, self._looks = store, looks

    def check(self, keys):
        self._looks -= 1
        assert self._looks, f"still waiting for {keys}"
        return self._store.check(keys)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_a_roll_called_by_who_knows_less_takes_no_newer_process_for_an_older():
    """Rank 1's second process has died; who called the later roll knows of its first one only."""
    board, store = Board(), Impatient(HashStore())
    roll = Roll(store, board, 0, 0, 2)
    roll.attempts[1] = 2
    board.tell_death(1, 2)
    store.set("roll/4/called", '{"members": [0, 1], "attempts": {"0": 0, "1": 1}}')
    decision = roll.call(3, [0, 1], {"rank": 0})
    assert (decision["epoch"], decision["members"]) == (5, [0])
