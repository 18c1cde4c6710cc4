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
"""Of the contract over virtual workers: the same code has passed them over processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item.cls, "__name__", "") == "TestVirtual" and item.originalname in SLOW:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
