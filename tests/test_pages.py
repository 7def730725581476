"""Page bookkeeping: nothing lost, nothing held twice, and equal prefixes found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_fast.engine.pages import PageAllocator, page_digest


def fill(allocator: PageAllocator, tokens: list[int]) -> list[int]:
    """A sequence computed to its end: matched prefix, fresh pages, full ones remembered."""
    found = allocator.match(tokens)
    fresh = allocator.allocate(-(-len(tokens) // allocator.page_size) - len(found))
    assert fresh is not None
    pages = found + fresh
    digest = b""
    for i in range(len(tokens) // allocator.page_size):
        digest = page_digest(digest, tokens[i * allocator.page_size : (i + 1) * allocator.page_size])
        allocator.remember(pages[i], digest)
    return pages


def test_page_zero_is_never_handed_out() -> None:
    allocator = PageAllocator(5, 4)
    assert sorted(allocator.allocate(4) or []) == [1, 2, 3, 4]
    assert allocator.allocate(1) is None


def test_a_failed_allocation_changes_nothing() -> None:
    allocator = PageAllocator(4, 4)
    assert allocator.allocate(4) is None
    assert allocator.num_available == 3
    allocator.check_integrity([])


def test_equal_prefixes_share_pages_and_different_ones_do_not() -> None:
    allocator = PageAllocator(20, 4)
    first = fill(allocator, list(range(12)))
    second = fill(allocator, [*range(8), 99, 98, 97, 96])
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    allocator.check_integrity([first, second])


def test_a_page_is_known_by_all_tokens_before_it() -> None:
    allocator = PageAllocator(20, 2)
    fill(allocator, [1, 2, 3, 4])
    assert allocator.match([9, 9, 3, 4, 5]) == []


def test_the_last_token_is_always_left_to_compute() -> None:
    allocator = PageAllocator(20, 4)
    pages = fill(allocator, list(range(8)))
    allocator.release(pages)
    assert allocator.match(list(range(8))) == pages[:1]
    assert allocator.match(list(range(9))) == pages


def test_salt_separates() -> None:
    allocator = PageAllocator(20, 2)
    fill(allocator, [1, 2, 3])
    assert allocator.match([1, 2, 3], salt=b"other") == []


def test_released_pages_survive_until_space_is_needed_least_recent_first() -> None:
    allocator = PageAllocator(5, 2)
    old, new = fill(allocator, [1, 2, 3, 4]), fill(allocator, [5, 6, 7, 8])
    allocator.release(old)
    allocator.release(new)
    assert allocator.num_available == 4
    taken = allocator.allocate(1)
    assert taken == [old[1]]  # the end of the sequence used longest ago
    assert allocator.match([1, 2, 3, 4, 0]) == old[:1]
    assert allocator.match([5, 6, 7, 8, 0]) == new


def test_without_prefix_cache_nothing_is_found() -> None:
    allocator = PageAllocator(9, 2, prefix_cache=False)
    fill(allocator, [1, 2, 3, 4])
    assert allocator.match([1, 2, 3, 4]) == []


def test_check_integrity_notices_a_leak_and_a_double_use() -> None:
    allocator = PageAllocator(9, 2)
    pages = allocator.allocate(2)
    assert pages is not None
    with pytest.raises(RuntimeError, match="held by sequences"):
        allocator.check_integrity([])
    allocator._free.append(pages[0])
    with pytest.raises(RuntimeError, match="free"):
        allocator.check_integrity([pages])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 2)), max_size=60))
def test_any_history_keeps_the_books(steps: list[tuple[int, int, int]]) -> None:
    allocator = PageAllocator(12, 2)
    live: list[list[int]] = []
    for kind, length, prefix in steps:
        if kind and live:
            allocator.release(live.pop(length % len(live)))
        else:
            tokens = [prefix] * (length % 9 + 1)
            needed = -(-len(tokens) // 2)
            if allocator.num_available >= needed:
                live.append(fill(allocator, tokens))
        allocator.check_integrity(live)
