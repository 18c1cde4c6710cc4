"""How a model is cut into BSP's buckets."""

import random

from hypothesis import given
from hypothesis import strategies as st

from offbeat.cluster.sizes import BUCKET, FIRST_BUCKET, LAST_BUCKET, buckets

BYTES = st.lists(st.integers(1, 6 << 20), min_size=1, max_size=60)


def weight(sizes: list[int], bucket: list[int]) -> int:
    return sum(sizes[number] for number in bucket)


@given(BYTES, st.randoms(use_true_random=False))
def test_every_parameter_is_in_one_bucket_and_the_last_ones_leave_first(
    sizes: list[int], rng: random.Random
) -> None:
    kinds = [rng.choice("ab") for _ in sizes]
    found = buckets(sizes, kinds)
    assert [number for bucket in found for number in bucket] == list(reversed(range(len(sizes))))
    assert all(len({kinds[number] for number in bucket}) == 1 for bucket in found)


@given(BYTES)
def test_little_is_left_when_backward_ends(sizes: list[int]) -> None:
    last = buckets(sizes)[-1]
    assert weight(sizes, last) <= LAST_BUCKET or last == [0]


@given(BYTES)
def test_buckets_are_worth_a_message(sizes: list[int]) -> None:
    weights = [weight(sizes, bucket) for bucket in buckets(sizes)]
    assert weights[0] >= FIRST_BUCKET or len(weights) <= 2
    assert all(size >= BUCKET for size in weights[1:-2])


def test_a_small_model_is_one_bucket() -> None:
    assert buckets([1000, 2000, 3000]) == [[2, 1, 0]]


def test_resnet_8s_last_bucket_is_small() -> None:
    """Its gradients come in this order; before, the last bucket had a half of it, and nothing hid that."""
    from examples.models import resnet8

    sizes = [p.numel() * 4 for p in resnet8().parameters()]
    weights = [weight(sizes, bucket) for bucket in buckets(sizes)]
    assert sum(weights) == sum(sizes) > 4 * weights[-1]
