"""Which methods are whose, by name; imports nothing, so that the page can be written anywhere."""

from __future__ import annotations

SAME = {
    "bsp": ("DDP",),
    "local(4)": (
        "DDP + PostLocalSGD(4)",
        "accelerate LocalSGD(4)",
        "torchft LocalSGD(4)",
        "torchft DiLoCo(4)",
    ),
    "dasgd(4,2)": ("torchft delayed(4,2)",),
}
"""The peers that do the same thing as a plan of Offbeat's. (DiLoCo has an outer optimizer besides.)"""


def of_peer(method: str) -> bool:
    return method.startswith(("DDP", "accelerate", "torchft"))


def of_offbeat(method: str) -> bool:
    return method.startswith(("bsp", "local(", "dasgd", "asp", "ssp"))
