"""The sizes at which the papers' experiments run: here, published, and only to see that everything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reproduce.runs import Run

SEEDS = 3


@dataclass(frozen=True)
class Setup:
    """One experiment's workers, network and data. script: words for train.py. units: of the job; unit_ms:
    what one takes here, of a core."""

    workers: int
    cluster: str | None
    network: str
    script: str
    units: int
    unit_ms: float = 0.0
    data: str = "cifar10"
    seeds: int = SEEDS

    @property
    def size(self) -> str:
        where = "virtual workers" if self.cluster else "workers"
        return f"{self.workers} {where}, {self.network}, {self.units:,} units"

    def runs(self, plan: str, more: str = "") -> list[Run]:
        """A run for each seed. more: further words for train.py, which override."""
        virtual = f"--virtual {self.workers} --cluster {self.cluster}"
        launch = f"{virtual if self.cluster else f'-n {self.workers}'} --total {self.units}"
        script = (*self.script.split(), *more.split())
        minutes = (START + self.units * self.unit_ms / 1e3) / 60
        return [
            Run(plan, seed, tuple(launch.split()), script, self.data, minutes) for seed in range(self.seeds)
        ]

    def with_(self, workers: int | None = None, times: float = 1.0, more: str = "") -> Setup:
        """Another number of workers, so many times the units, words that override."""
        return replace(
            self,
            workers=workers or self.workers,
            units=round(self.units * times),
            script=f"{self.script} {more}",
        )


START = 30.0
"""Seconds of a run's beginning and of its evaluations."""
HERE = "--subset 10000 --bf16"
SYNC_SWITCH = "--lr-reference worker --schedule step"
DASGD = "--schedule one-cycle --batch-size 32 --weight-decay 0.01"
GPU = "--device cuda"
RESNET_8 = "ResNet-8 with 16 channels, 10,000 images of CIFAR-10, batches of 32"
RESNET_32 = "ResNet-32, CIFAR-10, batches of 128"
SMALL = f"{HERE} {SYNC_SWITCH} --model resnet8 --width 0.5 --lr 0.03"
FULL = f"{GPU} {SYNC_SWITCH} --model resnet32 --batch-size 128 --lr 0.1"

SWITCHED: dict[str, dict[str, Setup]] = {
    "small": {
        "1": Setup(8, "sync-switch-1", RESNET_8, SMALL, 3130, 35),
        "2": Setup(
            8,
            "sync-switch-2",
            "ResNet-50 with an eighth of the channels and 5 blocks, 10,000 images of CIFAR-10 (in place of "
            "CIFAR-100), batches of 32",
            f"{HERE} {SYNC_SWITCH} --model resnet50 --width 0.125 --depth 0.25 --lr 0.03",
            3130,
            48,
        ),
        "3": Setup(16, "sync-switch-3", RESNET_8, SMALL, 3136, 36),
    },
    "full": {
        "1": Setup(8, None, RESNET_32, FULL, 64_000, seeds=5),
        "2": Setup(
            8,
            None,
            "ResNet-50, CIFAR-100, batches of 128",
            f"{GPU} {SYNC_SWITCH} --model resnet50 --classes 100 --batch-size 128 --lr 0.1",
            128_000,
            data="cifar100",
            seeds=5,
        ),
        "3": Setup(16, None, RESNET_32, FULL, 64_000, seeds=5),
    },
}
"""Sync-Switch's setups 1 to 3. Full: the units that the authors' logs have, five runs."""

FAMILIES = {
    "vgg16": ("0.25", "0.5", 26),
    "resnet50": ("0.125", "0.25", 45),
    "resnext29": ("0.125", "0.34", 42),
    "mobilenetv2": ("0.125", "0.2", 52),
}
"""DaSGD's networks that are trained here: width, depth, milliseconds of a unit."""
PUBLISHED = "googlenet vgg16 resnet50 resnet101 densenet121 mobilenetv2 resnext29 dpn92".split()
"""Those of its TABLE I."""
ITERATIONS = 2450


def averaged(mode: str, family: str = "resnet50") -> Setup:
    """DaSGD's experiment. Here a quarter of the iterations by a quarter of the workers, on a fifth of the
    images, with four times the learning rate: the sum of the learning rates is the paper's."""
    words = f"{DASGD} --model {family}"
    if mode == "full":
        script = f"{GPU} {words} --lr 0.01 --evaluate 5%"
        return Setup(32, None, f"{family}, CIFAR-10, batches of 32", script, 32 * ITERATIONS)
    width, depth, unit_ms = FAMILIES[family]
    words = f"{HERE} {words} --width {width} --depth {depth} --lr 0.04 --evaluate 5% --test-subset 1000"
    text = f"{family} at width {width} and depth {depth}, 10,000 images of CIFAR-10, batches of 32"
    setup = Setup(8, "dasgd-32", text, words, 8 * 612, unit_ms)
    return small(setup) if mode == "quick" else setup


def switched(mode: str, number: str) -> Setup:
    """Sync-Switch's setup."""
    return small(SWITCHED["small"][number]) if mode == "quick" else SWITCHED[mode][number]


def small(setup: Setup) -> Setup:
    """Two workers and some steps, to see that it runs."""
    tiny = "--subset 256 --test-subset 100 --last-subset 100 --batch-size 8 --width 0.125"
    script = f"{setup.script} {tiny}{'' if 'resnet8' in setup.script else ' --depth 0.05'}"
    return replace(setup, workers=2, cluster="here", script=script, units=32, seeds=2)


def families(mode: str) -> Sequence[str]:
    return PUBLISHED if mode == "full" else tuple(FAMILIES)
