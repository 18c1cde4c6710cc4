"""The contract's modules are not test modules by their names; pytest explains their assertions too."""

import pytest

PARTS = "asynchronous checkpoints endings losses misuse parity semantics shards stragglers training"
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
)
"""Of the matrix of deaths."""


def slow(item: pytest.Item) -> bool:
    suite = getattr(getattr(item, "cls", None), "__name__", "")
    name = getattr(item, "originalname", "")
    if suite == "TestVirtual":
        return name in SLOW or "wire]" in item.name or "hosts1" in item.name
    if suite == "TestLosses":
        return name.startswith("test_the_others") and not item.name.endswith(SAMPLE)
    return suite == "TestReal" and "hosts1" in item.name and "asp" not in item.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if slow(item):
            item.add_marker(pytest.mark.slow)
