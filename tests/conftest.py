"""The contract's modules are not test modules by their names; pytest explains their assertions too."""

import pytest
import torch

torch.set_num_threads(1)  # as the launched workers: how a sum is cut decides its last bits

PARTS = "asynchronous auto checkpoints endings losses misuse parity semantics shards stragglers training"
pytest.register_assert_rewrite(*(f"tests.contract_{part}" for part in PARTS.split()))

SLOW = {
    "test_every_plan_is_its_reference_at_every_total",
    "test_every_ticket_is_done_once_and_the_fast_do_more",
}
"""Of the contract over virtual workers, where the same code has passed it over processes; and so are tests on
several hosts, which differ in nothing but time there."""
SAMPLE = (
    "[bsp-backward-0]",
    "[dasgd(4,2)-average-2]",
    "[bsp-checkpoint-0]",
    "[bsp:32u local(2)-switch-2]",
    "[asp-push-hosts0-0]",
    "[ssp(2)-backward-hosts0-2]",
    "[asp-backward-hosts1-2]",
    "[asp:48u bsp-switch-hosts0-0]",
    "[bsp-hosts0-0.2]",
    "[asp-hosts1-0.2]",
    "[bsp:30% asp-hosts0-0.5]",
    "[push-asp]",
    "[backward-bsp]",
    "[-0.5-asp]",
    "[0.5-bsp]",
    "[meeting-0]",
    "[preparing-2]",
    "[bsp-giving-0]",
    "[asp-telling-2]",
    "died_those_that_come_say_so[asp]",
    "[local(8)-reconciling]",
    "[bsp-telling]",
    "[telling]",
)
"""Of the matrices of deaths and of those that come."""


FEW = {"TestReal": 2, "TestVirtual": 1, "": 5}
"""Of a test with more settings than these (of a suite, or of none) every third is run each time."""
STRIDE = {"TestReal": 4}
"""Or every fourth."""


def slow(item: pytest.Item) -> bool:
    suite, name = _of(item)
    if suite == "TestVirtual":
        return name in SLOW or "wire]" in item.name or "hosts1" in item.name
    if suite == "TestVirtualLosses" and "hosts1" in item.name:
        return True
    if suite in ("TestLosses", "TestVirtualLosses"):
        return item.name != name and not item.name.endswith(SAMPLE)
    return suite == "TestReal" and "hosts1" in item.name and "asp" not in item.name


def _of(item: pytest.Item) -> tuple[str, str]:
    return getattr(getattr(item, "cls", None), "__name__", ""), getattr(item, "originalname", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    engines = [item for item in items if item.path.stem in ("test_real", "test_virtual")]
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in engines:
        groups.setdefault(_of(item), []).append(item)
    for (suite, _), group in groups.items():
        for number, item in enumerate(group):
            if len(group) > FEW.get(suite, 5) and number % STRIDE.get(suite, 3):
                item.add_marker(pytest.mark.slow)
    for item in items:
        if slow(item):
            item.add_marker(pytest.mark.slow)
