"""The contract's modules are not test modules by their names; pytest explains their assertions too."""

import pytest

pytest.register_assert_rewrite(
    *(
        f"tests.contract_{part}"
        for part in "asynchronous checkpoints endings misuse parity semantics shards training".split()
    )
)
