"""The contract's modules are not test modules by their names; pytest explains their assertions too."""

import pytest

pytest.register_assert_rewrite(
    *(
        f"tests.contract_{part}"
        for part in "asynchronous checkpoints endings misuse parity semantics shards training".split()
    )
)

SLOW = {
    "test_every_plan_is_its_reference_at_every_total",
    "test_every_ticket_is_done_once_and_the_fast_do_more",
}
"""Of the contract over virtual workers, where the same code has passed it over processes; and so are tests on
several hosts, which differ in nothing but time there."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "cls", None), "__name__", "") == "TestVirtual" and (
            getattr(item, "originalname", "") in SLOW or "wire]" in item.name
        ):
            item.add_marker(pytest.mark.slow)
