"""Descriptions of virtual clusters: what each key means, and what a wrong one is told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.virtual.cluster import Allreduce, Cluster, ClusterError, Link, equal
from offbeat.virtual.cost import Costs, ready
from offbeat.virtual.description import PRESETS, find, preset, read
from offbeat.virtual.show import parts
from tests.reference_speeds import asp, bsp

ROOT = Path(__file__).parent.parent
UNIT = '[compute]\nunit = "100 ms"\n'


def described(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return read(path, source="c.toml")


def test_a_full_description(tmp_path: Path) -> None:
    found = described(
        tmp_path,
        """
        name = "all of it"
        [compute]
        unit = "100 ms"
        kind = "lognormal"
        sigma = 0.1
        backward = 0.5
        update = "2 ms"
        [[workers]]
        per_host = 2
        [[workers]]
        count = 1
        slow = 4
        rate = "100 Mbit/s"
        [[workers]]
        count = 2
        kind = "samples"
        samples = [0.1, "300 ms"]
        unit = "400 ms"
        [link]
        rate = "1 Gbit/s"
        latency = "0.1 ms"
        [host]
        rate = "10 GB/s"
        latency = "5 us"
        [allreduce]
        algorithm = "tree"
        overhead = "1 ms"
        per_member = "2 ms"
        rounds = 7.5
        in_flight = 4
        [shards]
        apply = "1 GiB/s"
        overhead = 0.001
        [[stragglers]]
        workers = [1, 2]
        at = ["100 s", "10 s"]
        seconds = "2 min"
        slow = 4
        [[stragglers]]
        every = "600 s"
        seconds = "inf"
        latency = "10 ms"
        count = 2
        [[failures]]
        worker = 2
        at = "500 s"
        [[joins]]
        at = "1 h"
        [switch]
        seconds = "36 s"
        [membership]
        seconds = 1
        [model]
        parameters = 25_600_000
        bytes_per_parameter = 2
        tensors = 161
        """,
    )
    assert (found.name, found.source, found.workers) == ("all of it", "c.toml", None)
    rest, slow, sampled = found.groups
    assert (rest.count, rest.per_host, rest.slow) == (None, 2, 1)
    assert (rest.compute.unit, rest.compute.kind, rest.compute.sigma) == (0.1, "lognormal", 0.1)
    assert rest.compute.update == 0.002
    assert rest.link == Link(125e6, 1e-4)
    assert (slow.slow, slow.compute, slow.link) == (4, rest.compute, Link(12.5e6, 1e-4))
    assert sampled.compute.samples == pytest.approx((0.2, 0.6))
    assert (found.backward, found.host) == (0.5, Link(10e9, 5e-6))
    assert found.allreduce == Allreduce("tree", 0.001, 0.002, 7.5, 4)
    assert (found.shards.apply, found.shards.overhead) == (2**30, 0.001)
    fixed, random = found.stragglers
    assert (fixed.workers, fixed.at, fixed.seconds, fixed.slow) == ((1, 2), (10, 100), 120, 4)
    assert (random.every, random.seconds, random.latency, random.count) == (600, inf, 0.01, 2)
    assert (found.failures[0].worker, found.failures[0].at) == (2, 500)
    assert (found.joins[0].at, found.joins[0].count) == (3600, 1)
    assert (found.switch, found.membership) == (36, 1)
    assert found.model is not None
    assert (found.model.parameters, len(found.model.sizes), found.model.width) == (25_600_000, 161, 2)
    assert [group.count for group in found.sized(10).groups] == [7, 1, 2]


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    found = described(tmp_path, UNIT)
    assert found.name == "c"
    assert len(found.groups) == 1
    assert found.groups[0].link == Link(1.25e9, 5e-5)
    assert found.host == Link(10e9, 5e-6)
    assert found.allreduce == Allreduce("ring", 0, 0, None, 4)
    assert (found.shards.apply, found.shards.overhead) == (2e9, 1e-4)
    assert found.backward == pytest.approx(2 / 3)
    assert found.model is None
    assert found.sized(3).groups[0].count == 3


WRONG = [
    ("", "c.toml: compute.unit: it is needed: a time such as"),
    ("[compute]\nunit = 0", "compute.unit: 0 is not a time such as"),
    ('[compute]\nunit = "100"', "compute.unit: '100' is not a time"),
    ('[compute]\nunit = "-1 s"', "compute.unit: '-1 s' is not a time"),
    ('[compute]\nunit = "1 s', "c.toml: it is no TOML"),
    (UNIT + 'kind = "normal"', "compute.kind: 'normal' is not one of constant, lognormal and samples"),
    (UNIT + 'kind = "lognormal"', "compute.sigma: it is needed: a number from 0 to 3"),
    (
        UNIT + "sigma = 0.1",
        "compute.sigma: 0.1 is not for kind = 'constant': it belongs to kind = 'lognormal'",
    ),
    (UNIT + "samples = [1]", "compute.samples: [1] is not for kind = 'constant'"),
    ('[compute]\nkind = "samples"\nsamples = []', "compute.samples: [] is not a list of times above 0"),
    ('[compute]\nkind = "samples"\nsamples = [1, 0]', "compute.samples: [1, 0] is not a list of times"),
    (UNIT + "backward = 1.5", "compute.backward: 1.5 is not a number from 0 to 1"),
    (UNIT + "backwards = 0.5", "compute.backwards: [compute] has no such key; valid: backward, "),
    (UNIT + "backwards = 0.5", "did you mean 'backward'?"),
    (UNIT + "[lnk]", "c.toml: lnk: a cluster has no such key"),
    (UNIT + "[lnk]", "did you mean 'link'?"),
    (UNIT + "[link]\nrate = 5", 'link.rate: 5 is not a rate such as "1 Gbit/s"'),
    (UNIT + '[link]\nrate = "5 Gbit"', "link.rate: '5 Gbit' is not a rate"),
    (UNIT + '[link]\nrate = "0 Gbit/s"', "link.rate: '0 Gbit/s' is not a rate"),
    (UNIT + '[link]\nlatency = "1 ms/s"', "link.latency: '1 ms/s' is not a time"),
    (UNIT + "[workers]\ncount = 1", "workers: {'count': 1} is not a list of tables: write [[workers]]"),
    (UNIT + "[[link]]", "link: [{}] is not a table: write [link]"),
    (UNIT + "[[workers]]\ncount = 0", "workers[1].count: 0 is not a whole number from 1"),
    (UNIT + "[[workers]]\ncount = true", "workers[1].count: True is not a whole number"),
    (UNIT + "[[workers]]\nslow = 0", "workers[1].slow: 0 is not a number above 0"),
    (UNIT + '[[workers]]\nper_host = "some"', "workers[1].per_host: 'some' is not a whole number from 1, or"),
    (UNIT + "[[workers]]\n[[workers]]", "workers: only one group can leave its count out"),
    (UNIT + "[[workers]]\nsigma = 0.1", "workers[1].sigma: 0.1 is not for kind = 'constant'"),
    (UNIT + "[[workers]]\nbackward = 0.1", "workers[1].backward: [workers[1]] has no such key"),
    ("size = 3\n" + UNIT + "[[workers]]\ncount = 2", "the groups' counts make 2 workers, not 3"),
    (
        UNIT + '[allreduce]\nalgorithm = "rng"',
        "'rng' is not one of ring, tree, butterfly and hierarchical; did",
    ),
    (
        UNIT + "[[stragglers]]\nworker = 0\nat = 1\nseconds = 1",
        "stragglers[1]: a straggler needs slow, latency",
    ),
    (UNIT + "[[stragglers]]\nworker = 0\nat = 1\nslow = 2", "stragglers[1].seconds: it is needed"),
    (UNIT + "[[stragglers]]\nat = 1\nseconds = 1\nslow = 2", "stragglers[1].workers: it is needed"),
    (UNIT + "[[stragglers]]\nworker = 0\nseconds = 1\nslow = 2", "stragglers[1].at: it is needed"),
    (
        UNIT + "[[stragglers]]\nworker = 0\nevery = 1\nseconds = 1\nslow = 2",
        "worker: 0 is not for stragglers that",
    ),
    (
        UNIT + "[[stragglers]]\nworker = 0\nworkers = [1]\nat = 1\nseconds = 1\nslow = 2",
        "give one of the two",
    ),
    (
        UNIT + "[[stragglers]]\nworker = 0\ncount = 2\nat = 1\nseconds = 1\nslow = 2",
        "count: 2 is not for stragg",
    ),
    (
        UNIT + "[[stragglers]]\nworker = -1\nat = 1\nseconds = 1\nslow = 2",
        "worker: -1 is not a whole number from 0",
    ),
    (UNIT + "[[stragglers]]\nworker = 0\nat = []\nseconds = 1\nslow = 2", "at: [] is not a time such as"),
    (UNIT + "[[stragglers]]\nevery = 1\nseconds = 1\nslow = 0.5", "slow: 0.5 is not a number from 1"),
    (UNIT + '[[failures]]\nworker = 1\nat = "x"', "failures[1].at: 'x' is not a time"),
    (UNIT + "[model]", "model.parameters: it is needed"),
    (UNIT + "[model]\ntensors = 5", "model.parameters: it is needed"),
    (
        UNIT + "[model]\nparameters = 5\ntensors = 6",
        "model.tensors: 6 is not a number of tensors that 5 parameters",
    ),
    (
        UNIT + "[model]\nparameters = 5\ntensors = [1, 2]",
        "parameters: 5 is not the sum of the tensors' sizes, 3",
    ),
    ('base = "nothing"\n', "c.toml: base: 'nothing' is neither a file nor a preset"),
    ('base = "c.toml"\n', "c.toml: base: 'c.toml' builds on this file itself"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_wrong_descriptions(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        described(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("c.toml: ")


SIZED = [
    ("", None, "size: how many workers?"),
    ("", 0, "at least one worker; got 0"),
    ("[[workers]]\ncount = 3", 4, "the groups' counts make 3 workers, not 4; leave one group's count out"),
    ("[[workers]]\ncount = 3\n[[workers]]", 3, "have 3 workers, which leaves none of 3 for the rest"),
    (
        "[[stragglers]]\nworkers = [0, 4]\nat = 1\nseconds = 1\nslow = 2",
        4,
        "stragglers[1]: there is no worker 4: the 4 workers are 0 to 3",
    ),
    (
        "[[stragglers]]\nevery = 1\nseconds = 1\nslow = 2\ncount = 3",
        2,
        "stragglers[1].count: 3 is more than all 2",
    ),
    ("[[failures]]\nworker = 2\nat = 1", 2, "failures[1].worker: there is no worker 2"),
]


@pytest.mark.parametrize(("text", "workers", "message"), SIZED)
def test_sizes_that_do_not_fit(tmp_path: Path, text: str, workers: int | None, message: str) -> None:
    cluster = described(tmp_path, UNIT + text)
    with pytest.raises(ClusterError) as caught:
        cluster.sized(workers)
    assert message in str(caught.value)


def test_a_size_given_by_the_caller_counts_before_the_files_own(tmp_path: Path) -> None:
    cluster = described(tmp_path, "size = 8\n" + UNIT + "[[workers]]\n[[workers]]\ncount = 1\nslow = 2")
    assert cluster.workers == 8
    assert [g.count for g in cluster.sized().groups] == [7, 1]
    assert [g.count for g in cluster.sized(4).groups] == [3, 1]
    assert cluster.sized(4).sized() == cluster.sized(4)


TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
RATES = {
    "bit/s": 0.125,
    "kbit/s": 125.0,
    "Mbit/s": 125e3,
    "Gbit/s": 125e6,
    "Gbps": 125e6,
    "Gb/s": 125e6,
    "B/s": 1.0,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "GiB/s": 2.0**30,
    "MBps": 1e6,
}


@given(st.floats(1e-3, 1e6), st.sampled_from(sorted(TIMES)), st.sampled_from(sorted(RATES)), st.booleans())
def test_quantities(
    tmp_path_factory: pytest.TempPathFactory, value: float, time: str, rate: str, blank: bool
) -> None:
    gap = " " if blank else ""
    found = described(
        tmp_path_factory.mktemp("q"),
        f'[compute]\nunit = "{value!r}{gap}{time}"\n'
        f'[link]\nrate = "{value!r}{gap}{rate}"\nlatency = {value!r}',
    )
    group = found.groups[0]
    assert group.compute.unit == pytest.approx(value * TIMES[time])
    assert group.link.rate == pytest.approx(value * RATES[rate])
    assert group.link.latency == value


def test_a_base_is_built_on_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(
        'name = "below"\n' + UNIT + 'update = "1 ms"\n[[workers]]\ncount = 2\n[[workers]]\ncount = 1\n'
    )
    found = described(tmp_path, 'base = "below.toml"\n[compute]\nunit = "50 ms"\n[[workers]]\ncount = 5\n')
    assert found.name == "below"
    assert (found.groups[0].compute.unit, found.groups[0].compute.update) == (0.05, 0.001)
    assert [g.count for g in found.groups] == [5]
    over = described(tmp_path, 'base = "sync-switch-1"\nsize = 4\n')
    assert over.sized().groups[0].compute == preset("sync-switch-1").groups[0].compute


def test_files_and_presets_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(UNIT)
    assert find(str(tmp_path / "mine.toml")).source == str(tmp_path / "mine.toml")
    assert find("here").source == "here"
    with pytest.raises(ClusterError, match=r"'her' is neither a file nor a preset; .*did you mean 'here'\?"):
        find("her")
    with pytest.raises(ClusterError, match="there is no preset 'her'"):
        preset("her")
    with pytest.raises(ClusterError, match="it cannot be read"):
        read(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ClusterError, match="it is no UTF-8 text"):
        read(tmp_path / "latin.toml")


@given(st.integers(1, 10**8), st.integers(1, 200))
def test_equal_tensors(parameters: int, tensors: int) -> None:
    sizes = equal(parameters, min(tensors, parameters))
    assert sum(sizes) == parameters
    assert max(sizes) - min(sizes) <= 1
    assert sum(equal(parameters)) == parameters
    assert max(equal(parameters)) <= 100_000


# Presets


def speeds(cluster: Cluster) -> tuple[float, float]:
    """BSP steps per second and ASP pushes per second without stragglers."""
    from offbeat.virtual.timing import Model

    calm = replace(cluster.sized(), stragglers=())
    assert calm.model is not None
    model = Model(calm.model.sizes, calm.model.width)
    buckets = model.buckets()
    sizes = [float(sum(model.sizes[i] for i in bucket) * model.width) for bucket in buckets]
    steps = bsp(Costs(calm, 0), sizes, ready(model.sizes, [len(b) for b in buckets]), 20)
    return steps, asp(Costs(calm, 0), model.size, model.size)


@pytest.mark.parametrize(
    ("setup", "workers", "bsp_steps", "asp_steps"),
    [(1, 8, 0.7511, 41.0), (2, 8, 1.4184, 21.08), (3, 16, 0.4255, 77.87)],
)
def test_sync_switch_presets_have_the_logged_speeds(
    setup: int, workers: int, bsp_steps: float, asp_steps: float
) -> None:
    cluster = preset(f"sync-switch-{setup}")
    assert cluster.workers == workers
    assert speeds(cluster) == pytest.approx((bsp_steps, asp_steps), rel=2e-3)
    for kind, hit, times, latency in (("mild", 1, 1, 0.01), ("moderate", 2, 4, 0.03)):
        (straggler,) = preset(f"sync-switch-{setup}-{kind}").stragglers
        assert (len(straggler.workers), len(straggler.at)) == (hit, times)
        assert (straggler.seconds, straggler.latency) == (100, latency)


def test_every_preset_is_complete() -> None:
    assert {"sync-switch-1", "dasgd-32", "ethernet-256", "here"} < set(PRESETS)
    for name in PRESETS:
        cluster = preset(name).sized()
        costs = Costs(cluster, 0)
        assert costs.unit(0, 0.0) > 0
        assert costs.allreduce(1e6, range(costs.workers), 0.0) > 0
        assert list(parts(cluster))
    assert Costs(preset("ethernet-256"), 0).hosts == 32
    assert Costs(preset("dasgd-32"), 0).hosts == 4
    assert Costs(preset("here").sized(5), 0).hosts == 1


def test_dasgd_preset_has_the_papers_communication_time() -> None:
    """2.5 levels' worth by hand: three levels of PCIe and two of Ethernet for 102 MB."""
    costs = Costs(preset("dasgd-32"), 0)
    assert costs.allreduce(102e6, range(32), 0.0) == pytest.approx(3 * 102e6 / 16e9 + 2 * 102e6 / 2.5e9)


# The command


def answer(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["cluster", *words])
    return done.exit_code, done.stdout, done.stderr


def test_list() -> None:
    code, out, _ = answer("list")
    assert code == 0
    assert all(name in out for name in PRESETS)


def test_show(tmp_path: Path) -> None:
    code, out, err = answer("show", "sync-switch-1-moderate")
    assert (code, err) == (0, "")
    for text in (
        "Sync-Switch, setup 1, moderate stragglers: 8 workers on 8 hosts",
        "191.5 ms",
        "10 Gbit/s",
        "ring (used)",
        "the model, 1.857 MB",
        "workers 1, 5 at 50 s, 200 s, 350 s, 500 s, for 100 s: exchanges 30 ms longer",
        "BSP 0.7499 steps/s, 5.999 units/s",
        "ASP 40.98 steps/s",
    ):
        assert text in out, text
    (tmp_path / "c.toml").write_text(
        UNIT
        + '[[workers]]\nper_host = 2\n[[workers]]\ncount = 1\nslow = 4\nkind = "samples"\nsamples = [1, 2]\n'
        + '[[stragglers]]\nevery = "1 min"\nseconds = "inf"\nslow = 2\n'
        + "[[failures]]\nworker = 1\nat = 5\n[[joins]]\nat = 6\ncount = 2\n"
    )
    code, out, _ = answer("show", str(tmp_path / "c.toml"), "--workers", "5", "--parameters", "1.5M")
    assert code == 0
    for text in (
        "5 workers on 3 hosts",
        "0–3",
        "400 ms on average of 2 samples (4× slower)",
        "1 worker at random every 60 s or so, to the end: 2× slower",
        "worker 1 dies at 5 s",
        "2 newcomers at 6 s",
        "1,500,000 parameters in 4 buckets",
    ):
        assert text in out, text
    code, out, _ = answer("show", "here")
    assert "give --parameters" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nothing"], "'nothing' is neither a file nor a preset"),
        (["show", "here", "-n", "0"], "here: a cluster has at least one worker; got 0"),
        (["show", "here", "--parameters", "few"], "--parameters few: a whole number of parameters from 1"),
        (["show", "sync-switch-1-mild", "-n", "1"], "there is no worker 1: the 1 workers are 0 to 0"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    code, _, err = answer(*words)
    assert code == 2
    assert message in err


def test_lists_without_torch() -> None:
    code = (
        "import sys\nfrom offbeat.cli import main\nsys.argv = ['offbeat', 'cluster', 'list']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
