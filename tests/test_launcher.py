"""The launcher with real processes. The scripts import no torch, so that a run takes a blink."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Command
from torch.distributed import TCPStore

from offbeat.cluster.launcher import Launcher, LaunchError, LaunchSpec, Outcome
from offbeat.cluster.process import Tail
from offbeat.cluster.spec import new_directory, split_endpoint
from tests.jobs import free_port

REPORT = """
import json, os, sys
rank = os.environ["RANK"]
with open(os.path.join(os.environ["OFFBEAT_OUT"], f"seen-{rank}.json"), "w") as file:
    json.dump({"env": dict(os.environ), "argv": sys.argv[1:]}, file)
print("out of", rank)
print("err of", rank, file=sys.stderr)
"""

# Rank 1 fails once the others are up; they would go on for ever.
ONE_FAILS = """
import os, sys, time
from pathlib import Path
out, rank = Path(os.environ["OFFBEAT_OUT"]), int(os.environ["RANK"])
(out / f"up-{rank}").write_text(str(os.getpid()))
while len(list(out.glob("up-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if rank == 1:
    HOW
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def script(text: str, name: str = "job.py") -> str:
    Path(name).write_text(text)
    return name


def launch(spec: LaunchSpec, limit: float = 60) -> tuple[Outcome, list[tuple[int, str, str]], Path]:
    said: list[tuple[int, str, str]] = []
    end = time.monotonic() + limit
    with Launcher(spec, lambda *row: said.append(row)) as launcher:
        launcher.start()
        while (outcome := launcher.poll()) is None:
            if time.monotonic() > end:
                pytest.fail(f"no end within {limit} s")
            time.sleep(0.01)
    return outcome, said, launcher.out


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def until(condition: Callable[[], bool], limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


# One host


def test_workers_see_the_contract() -> None:
    spec = LaunchSpec(
        script(REPORT),
        ("--lr", "0.1", "a b", ""),
        workers=3,
        plan="bsp",
        total=640,
        seed=7,
        wire="bf16",
        on_diverge="rollback",
    )
    outcome, _, out = launch(spec)
    assert outcome == Outcome(0)
    seen = [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(3)]
    for rank, one in enumerate(seen):
        env = one["env"]
        assert one["argv"] == ["--lr", "0.1", "a b", ""]
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("3", "3", "0")
        assert env["OMP_NUM_THREADS"] == "1"
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert env["TORCHELASTIC_RUN_ID"]
        assert (env["MASTER_ADDR"], int(env["MASTER_PORT"]) > 0) == ("127.0.0.1", True)
        assert (env["OFFBEAT_PLAN"], env["OFFBEAT_TOTAL"]) == ("bsp", "640")
        assert (env["OFFBEAT_SEED"], env["OFFBEAT_WIRE"]) == ("7", "bf16")
        assert env["OFFBEAT_ON_DIVERGE"] == "rollback"
        assert env["OFFBEAT_SHARDS"].startswith(f"/proc/{os.getpid()}/fd/")
        assert env["OFFBEAT_OUT"] == str(out)
        assert Path(env["OFFBEAT_OUT"]).is_absolute()
        assert int(env["OFFBEAT_LAUNCHER"]) == os.getpid()
        assert 0 <= time.time() - float(env["OFFBEAT_SPAWNED"]) < 600
        assert "TORCH_CPP_LOG_LEVEL" not in env
    assert len({one["env"]["MASTER_PORT"] for one in seen}) == 1


def test_what_was_not_asked_is_not_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    _, _, out = launch(LaunchSpec(script(REPORT)))
    env = json.loads((out / "seen-0.json").read_text())["env"]
    settings = ["PLAN", "TOTAL", "SEED", "WIRE", "ON_DIVERGE"]
    assert not {f"OFFBEAT_{name}" for name in settings} & set(env)
    assert env["OMP_NUM_THREADS"] == "3"


def test_workers_reach_the_store() -> None:
    text = "\n".join(
        [
            "import os, datetime",
            "from torch.distributed import TCPStore",
            "store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False,",
            "                 wait_for_workers=False, timeout=datetime.timedelta(seconds=30))",
            "store.add('offbeat/n', 1)",
            "while store.add('offbeat/n', 0) < 2: pass",
        ]
    )
    assert launch(LaunchSpec(script(text), workers=2))[0].code == 0


# Rank 1 gives the shards a size and writes, and is gone before rank 0 reads.
SHARES = """
import mmap, os, time
from pathlib import Path
out = Path(os.environ["OFFBEAT_OUT"])
if os.environ["RANK"] == "1":
    with open(os.environ["OFFBEAT_SHARDS"], "r+b") as file:
        file.truncate(1 << 24)
        mmap.mmap(file.fileno(), 1 << 24)[-5:] = b"hello"
    os._exit(0)
while os.stat(os.environ["OFFBEAT_SHARDS"]).st_size == 0:
    time.sleep(0.01)
with open(os.environ["OFFBEAT_SHARDS"], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 1 << 24)
    while memory[-5:] != b"hello":
        time.sleep(0.01)
    (out / "linked").write_text(os.readlink(os.environ["OFFBEAT_SHARDS"]))
"""


def test_the_launcher_holds_the_memory_of_the_shards() -> None:
    def held() -> list[str]:
        files = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(file) for file in files if file.is_symlink()]

    before = held()
    outcome, _, out = launch(LaunchSpec(script(SHARES), workers=2))
    assert outcome == Outcome(0)
    assert (out / "linked").read_text().startswith("/memfd:offbeat-shards")
    assert sum("offbeat-shards" in file for file in held()) == sum("offbeat-shards" in f for f in before) == 0


def test_a_platform_without_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    outcome, _, out = launch(LaunchSpec(script(REPORT)))
    assert outcome == Outcome(0)
    assert "OFFBEAT_SHARDS" not in json.loads((out / "seen-0.json").read_text())["env"]


def test_output_goes_to_files_and_rank_0_is_shown() -> None:
    _, said, out = launch(LaunchSpec(script(REPORT), workers=2))
    assert sorted(said) == [(0, "err", "err of 0\n"), (0, "out", "out of 0\n")]
    for rank in range(2):
        assert (out / "logs" / f"rank{rank}.out").read_text() == f"out of {rank}\n"
        assert (out / "logs" / f"rank{rank}.err").read_text() == f"err of {rank}\n"


@pytest.mark.parametrize(("show", "ranks"), [("all", {0, 1}), ("none", set())])
def test_output_of_all_or_of_nobody(show: str, ranks: set[int]) -> None:
    _, said, _ = launch(LaunchSpec(script(REPORT), workers=2, show=show))  # type: ignore[arg-type]
    assert {rank for rank, _, _ in said} == ranks


@pytest.mark.parametrize(
    ("how", "told", "words"),
    [
        ("raise KeyError('the key')", "exit code 1", "KeyError: 'the key'"),
        ("sys.exit(7)", "exit code 7", None),
        ("os.kill(os.getpid(), 9)", "signal 9, SIGKILL", None),
    ],
)
def test_a_failure_is_named_and_stops_the_others(how: str, told: str, words: str | None) -> None:
    outcome, _, out = launch(LaunchSpec(script(ONE_FAILS.replace("HOW", how)), workers=3))
    assert outcome.code == 1
    assert outcome.message == f"rank 1 on {socket.gethostname()} failed with {told}"
    assert (words in outcome.detail[-1]) if words else outcome.detail == ()
    assert all(gone(int((out / f"up-{rank}").read_text())) for rank in range(3))


def test_only_the_last_lines_of_a_long_error() -> None:
    text = ONE_FAILS.replace("HOW", "print(*range(500), sep='\\n', file=sys.stderr); sys.exit(1)")
    outcome, _, _ = launch(LaunchSpec(script(text), workers=2))
    assert outcome.detail == tuple(map(str, range(480, 500)))


def test_a_worker_deaf_to_term_is_killed() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ONE_FAILS
    spec = LaunchSpec(script(deaf.replace("HOW", "sys.exit(1)")), workers=2, grace=0.3)
    outcome, _, out = launch(spec)
    assert outcome.code == 1
    assert gone(int((out / "up-0").read_text()))


def test_what_a_failed_worker_started_ends_too() -> None:
    how = (
        "import subprocess; p = subprocess.Popen(['sleep', '600']); "
        "(out / 'child').write_text(str(p.pid)); sys.exit(3)"
    )
    _, _, out = launch(LaunchSpec(script(ONE_FAILS.replace("HOW", how)), workers=2))
    until(lambda: gone(int((out / "child").read_text())))


def test_a_launcher_gives_the_signals_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    launch(LaunchSpec(script("pass")))
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_abandoned_launcher_stops_its_workers() -> None:
    path = script("import time; time.sleep(600)")

    def abandon() -> None:
        with launcher:
            launcher.start()
            raise RuntimeError("from outside")

    launcher = Launcher(LaunchSpec(path))
    with pytest.raises(RuntimeError, match="from outside"):
        abandon()
    assert gone(launcher.workers[0].pid)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "-n 0: a host runs at least one worker"),
        ({"nnodes": 0}, "--nnodes 0"),
        ({"nnodes": 2}, "--rdzv-endpoint HOST:PORT"),
        ({"nnodes": 2, "node_rank": 2, "endpoint": "a:1"}, "--node-rank 2: with --nnodes 2 it is 0 to 1"),
        ({"endpoint": "nowhere"}, "'nowhere'"),
        ({"total": 0}, "--total 0"),
        ({"wire": "fp8"}, "valid are bf16 and fp32"),
        ({"on_diverge": "stop"}, "--on-diverge stop: valid are raise, rollback and ignore"),
        ({"rdzv_timeout": 0}, "--rdzv-timeout 0"),
        ({"rdzv_timeout": float("nan")}, "--rdzv-timeout nan"),
        ({"script": "none.py"}, "there is no script none.py"),
        ({"script": "."}, "is a directory"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(LaunchError) as error:
        LaunchSpec(**{"script": script("pass"), **settings})  # type: ignore[arg-type]
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"), [("h:1", ("h", 1)), ("10.0.0.1:29500", ("10.0.0.1", 29500)), ("[::1]:80", ("::1", 80))]
)
def test_endpoints(text: str, value: tuple[str, int]) -> None:
    assert split_endpoint(text) == value


@pytest.mark.parametrize(
    "text", ["", "h", "h:", ":1", "h:0", "h:65536", "h:x", "http://h:1", "::1:80", "h:1:2"]
)
def test_no_endpoints(text: str) -> None:
    with pytest.raises(LaunchError, match="HOST:PORT"):
        split_endpoint(text)


def test_directories_are_never_shared(tmp_path: Path) -> None:
    made = [new_directory("dir/train.py", tmp_path, now=0) for _ in range(3)]
    assert [path.name[15:] for path in made] == ["-train", "-train-2", "-train-3"]


def test_a_directory_with_a_journal_is_refused() -> None:
    Path("old").mkdir()
    Path("old/journal.jsonl").touch()
    with pytest.raises(LaunchError, match="earlier run"):
        launch(LaunchSpec(script("pass"), out="old"))


def test_tail_holds_unfinished_lines_back(tmp_path: Path) -> None:
    path, tail = tmp_path / "log", Tail(tmp_path / "log", whole=True)
    assert tail.read() == ""
    with path.open("wb", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.read() == "one\n"
        file.write("o\nthree €".encode()[:-1])
        assert tail.read() == "two\n"
        file.write("€".encode()[-1:])
        assert tail.read() == ""
    assert tail.read(final=True) == "three €\n"


# Several hosts: launchers of their own on this machine


@pytest.fixture
def hosts() -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*words: object) -> Command:
        started.append(Command("run", *words))
        return started[-1]

    yield start
    for host in started:
        host.kill()


def several(node: int, port: int, count: int = 2) -> list[object]:
    return ["--nnodes", count, "--node-rank", node, "--rdzv-endpoint", f"127.0.0.1:{port}"]


def test_hosts_with_different_counts(hosts: Callable[..., Command]) -> None:
    port, path = free_port(), script(REPORT)
    second = hosts(*several(1, port), "-n", 2, path)
    first = hosts(*several(0, port), "-n", 1, path, "--out", "both")
    for host in (first, second):
        code, _, err = host.end()
        assert code == 0, err
    ranks = [json.loads(Path(f"both/seen-{rank}.json").read_text())["env"] for rank in range(3)]
    assert [env["WORLD_SIZE"] for env in ranks] == ["3"] * 3
    assert [env["LOCAL_RANK"] for env in ranks] == ["0", "0", "1"]
    assert [env["LOCAL_WORLD_SIZE"] for env in ranks] == ["1", "2", "2"]
    assert [env["GROUP_RANK"] for env in ranks] == ["0", "1", "1"]
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in ranks} == {("127.0.0.1", str(port))}
    assert {env["OFFBEAT_OUT"] for env in ranks} == {str(Path("both").absolute())}


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_a_failure_ends_all_hosts(hosts: Callable[..., Command], counts: tuple[int, int]) -> None:
    """Rank 1 is on the first host, and then on the second."""
    port, path = free_port(), script(ONE_FAILS.replace("HOW", "raise KeyError('the key')"))
    both = [
        hosts(*several(node, port), "-n", counts[node], path, *(["--out", "both"] if node == 0 else []))
        for node in (0, 1)
    ]
    place = f"(node {0 if counts[0] == 2 else 1})"
    for host in both:
        code, _, err = host.end()
        assert code == 1, err
        assert f"rank 1 on {socket.gethostname()} {place} failed with exit code 1" in err
        assert "KeyError: 'the key'" in err
    assert all(gone(int(Path(f"both/up-{rank}").read_text())) for rank in range(3))


def test_a_host_that_does_not_come(hosts: Callable[..., Command]) -> None:
    port, path = free_port(), script("pass")
    both = [
        hosts(
            *several(node, port, 4),
            *(path, "--rdzv-timeout", limit, "--plan", "bsp", "--on-diverge", "ignore", "--", "-x", "a b"),
        )
        for node, limit in ((0, 3), (2, 60))
    ]
    for host in both:
        code, _, err = host.end()
        assert code == 2, err
        assert err.count("\n") == 1
        assert "node ranks 1, 3 of 4 did not come" in err
        assert f"--nnodes 4 --node-rank 1 --rdzv-endpoint 127.0.0.1:{port} -n 1 --plan" in err
        assert "--on-diverge ignore job.py -- -x 'a b'" in err


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (["--node-rank", 1], "--node-rank 1 is taken by"),
        (["--nnodes", 4], "--nnodes differs between the hosts: 4 on node 2"),
        (["--plan", "local"], "--plan differs between the hosts: 'local' on node 2"),
        (["--on-diverge", "ignore"], "--on-diverge differs between the hosts: 'ignore' on node 2"),
        (["other.py"], "SCRIPT differs between the hosts: 'other.py' on node 2"),
    ],
)
def test_a_host_that_does_not_fit(hosts: Callable[..., Command], mine: list[object], words: str) -> None:
    port, path = free_port(), script("pass")
    script("pass", "other.py")
    first = hosts(*several(0, port, 3), "--plan", "bsp", path)
    second = hosts(*several(1, port, 3), "--plan", "bsp", path)
    # Else the wrong one might come first and be the right one.
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    until(lambda: store.check(["launcher/host/1"]))
    wrong = hosts(*several(2, port, 3), "--plan", "bsp", *mine, *([] if "other.py" in mine else [path]))
    code, _, err = wrong.end()
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
    third = hosts(*several(2, port, 3), "--plan", "bsp", path)
    ends = [host.end() for host in (first, second, third)]
    assert [code for code, _, _ in ends] == [0, 0, 0]
    assert "a host was turned away" in ends[0][2]


def test_a_dead_port_a_used_one_and_a_stranger(hosts: Callable[..., Command]) -> None:
    path = script("pass")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        used = hosts(*several(0, port), path)
        silent = hosts(*several(1, port), path, "--rdzv-timeout", 2)
        dead = hosts(*several(1, free_port()), path, "--rdzv-timeout", 1)
        for host, words in (
            (used, "in use"),
            (silent, "no launcher of offbeat"),
            (dead, "nothing answers at 127.0.0.1"),
        ):
            code, out, err = host.end()
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert words in err
    assert not Path("runs").exists()


def test_a_store_lost_during_the_run(hosts: Callable[..., Command]) -> None:
    port, path = free_port(), script(ONE_FAILS.replace("HOW", "pass"))
    first = hosts(*several(0, port), path, "--out", "both")
    second = hosts(*several(1, port), path)
    until(lambda: Path("both/up-1").exists() and Path("both/up-1").read_text() != "")
    until(lambda: Path("both/up-0").exists() and Path("both/up-0").read_text() != "")
    first.kill()
    try:
        code, _, err = second.end()
        assert code == 1
        assert f"node 0's launcher, at 127.0.0.1:{port}, was lost" in err
        assert gone(int(Path("both/up-1").read_text()))
    finally:  # this script does not ask to die with its launcher, as `offbeat.init` does
        os.kill(int(Path("both/up-0").read_text()), signal.SIGKILL)


def test_a_host_that_was_killed_comes_back_by_its_own_command(hosts: Callable[..., Command]) -> None:
    port, path = free_port(), script(ONE_FAILS.replace("HOW", "pass"))
    words = ["--min", 1, "--max", 3, "--heartbeat", 0.2, path]
    first = hosts(*several(0, port), *words, "--out", "both")
    second = hosts(*several(1, port), *words)
    until(lambda: all(Path(f"both/up-{r}").exists() and Path(f"both/up-{r}").read_text() for r in (0, 1)))
    try:
        second.kill()
        back = hosts(*several(1, port), *words)
        until(lambda: Path("both/up-2").exists())
        assert f"comes to the job at 127.0.0.1:{port} as rank 2" in back.err
        code, _, err = hosts(*several(1, port), *words).end()
        assert (code, err.count("\n")) == (2, 1)
        assert "there may be 3 (--max)" in err
        first.signal(signal.SIGTERM)
        assert [host.end()[0] for host in (first, back)] == [143, 1]
    finally:
        os.kill(int(Path("both/up-1").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_one_host_ends_all(hosts: Callable[..., Command], number: int, code: int) -> None:
    port, path = free_port(), script(ONE_FAILS.replace("HOW", "pass"))
    first = hosts(*several(0, port), path, "--out", "both")
    second = hosts(*several(1, port), path)
    until(lambda: all(Path(f"both/up-{r}").exists() and Path(f"both/up-{r}").read_text() for r in (0, 1)))
    second.signal(number)
    assert second.end()[0] == code
    ended, _, err = first.end()
    assert ended == 1
    assert f"stopped by {signal.Signals(number).name} on {socket.gethostname()} (node 1)" in err
    assert all(gone(int(Path(f"both/up-{rank}").read_text())) for rank in (0, 1))
