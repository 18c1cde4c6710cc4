"""Hosts from Ray: an actor on each of them runs `offbeat run`.

python examples/launch/ray_job.py --hosts 4 --workers 8 -- train.py --epochs 30
python examples/launch/ray_job.py --hosts 4 --workers 8 -- --plan "bsp:6.25% asp" --min 24 train.py

What stands behind -- is `offbeat run`'s: its options, the script, the script's arguments. The current folder
is sent to the hosts, but what the job writes stays there: give --out and checkpoints as paths that all hosts
see. With --min and --max the job goes on without a host that Ray has lost, and takes the one that Ray finds
instead.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Host:
    """One host of the job, as long as the actor lives."""

    def endpoint(self) -> str:
        """This host's address and a port that is free there."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, words: list[str]) -> int:
        """The exit code of this host's launcher."""
        # Ray gives the actor as many threads as it has processors; each worker would start as many.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        return subprocess.call([sys.executable, "-m", "offbeat", "run", *words], env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="on each host")
    parser.add_argument("--gpus", type=float, default=0, help="of each worker")
    parser.add_argument("--anywhere", action="store_true", help="hosts may share a machine")
    parser.add_argument("words", nargs="+", help="offbeat run's")
    args = parser.parse_args()

    ray.init(runtime_env={"working_dir": os.getcwd()})
    needs = {"CPU": args.workers, "GPU": args.workers * args.gpus}
    bundle = {kind: number for kind, number in needs.items() if number}
    group = placement_group([bundle] * args.hosts, strategy="PACK" if args.anywhere else "STRICT_SPREAD")
    ray.get(group.ready())
    hosts = [
        Host.options(
            num_cpus=args.workers,
            num_gpus=args.workers * args.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            max_restarts=3 if number else 0,  # the first host's launcher holds the job's store
            max_task_retries=3 if number else 0,
        ).remote()
        for number in range(args.hosts)
    ]
    endpoint = ray.get(hosts[0].endpoint.remote())
    common = ["--nnodes", args.hosts, "--rdzv-endpoint", endpoint, "-n", args.workers, *args.words]
    runs = [
        host.run.remote([str(word) for word in ("--node-rank", rank, *common)])
        for rank, host in enumerate(hosts)
    ]
    code = ray.get(runs[0])  # its launcher ends when the job does, and says what went wrong elsewhere
    remove_placement_group(group)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
