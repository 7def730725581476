"""The scheduler alone: order, chunks, preemption, and that every page comes back. No model, no torch."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.queue import Queue
from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import Scheduler
from gpt_fast.engine.text import TextStream
from gpt_fast.params import SamplingParams


class Letters:
    def push(self, token: int) -> str:
        return chr(97 + token % 26)

    def flush(self) -> str:
        return ""


def request(name: str, tokens: list[int], max_tokens: int = 4) -> Request:
    return Request(
        id=name,
        token_ids=list(tokens),
        params=SamplingParams(max_tokens=max_tokens).resolved(),
        seed=0,
        max_tokens=max_tokens,
        end_ids=frozenset(),
        text=TextStream(Letters()),
    )


def scheduler(num_pages: int = 50, page_size: int = 4, max_batch: int = 4, prefill_chunk: int = 8) -> Scheduler:
    return Scheduler(PageAllocator(num_pages, page_size), max_batch, prefill_chunk)


def turn(s: Scheduler) -> list[tuple[str, int]]:
    """One step with a model that always says the sequence's length; returns who computed how many tokens."""
    plan, requests = s.schedule()
    for r, part in zip(requests, plan.sequences, strict=True):
        assert part.start == r.num_computed
        assert part.tokens == tuple(r.token_ids[part.start : part.start + len(part.tokens)])
        assert part.num_placed + len(part.new_pages) == len(r.pages)
        assert len(r.pages) * s.pages.page_size >= part.start + len(part.tokens)
        if part.num_logits:
            r.append([r.num_tokens], 0.0)
        s.advance(r, len(part.tokens))
        if r.finish_reason:
            s.finish(r)
    s.check_integrity()
    return [(r.id, len(part.tokens)) for r, part in zip(requests, plan.sequences, strict=True)]


def test_a_long_prompt_is_computed_in_chunks_and_in_smaller_ones_beside_decodes() -> None:
    s = scheduler(prefill_chunk=20)
    s.add(request("a", [1] * 30, max_tokens=6))
    assert [turn(s), turn(s)] == [[("a", 20)], [("a", 10)]]
    s.add(request("long", list(range(12)), max_tokens=2))
    assert turn(s) == [("a", 1), ("long", 5)]
    assert turn(s) == [("a", 1), ("long", 5)]
    assert turn(s) == [("a", 1), ("long", 2)]
    assert turn(s) == [("a", 1), ("long", 1)]


def test_whole_prompts_are_not_divided_beside_decodes_nor_beside_each_other() -> None:
    s = Scheduler(PageAllocator(50, 4), 4, prefill_chunk=20, whole_prompts=True)
    s.add(request("a", [1] * 15, max_tokens=6))
    s.add(request("b", [2] * 18, max_tokens=6))
    s.add(request("c", [3] * 19, max_tokens=6))
    assert turn(s) == [("a", 15), ("b", 18)]
    assert turn(s) == [("a", 1), ("b", 1), ("c", 19)]
    assert turn(s) == [("a", 1), ("b", 1), ("c", 1)]


def test_first_come_first_served_and_max_batch() -> None:
    s = scheduler(max_batch=2)
    for name in "abc":
        s.add(request(name, [1, 2], max_tokens=2))
    assert turn(s) == [("a", 2), ("b", 2)]
    assert turn(s) == [("a", 1), ("b", 1)]
    assert turn(s) == [("c", 2)]


def test_a_prefix_computed_before_is_not_computed_again() -> None:
    s = scheduler(prefill_chunk=100)
    s.add(request("a", list(range(20)), max_tokens=1))
    assert turn(s) == [("a", 20)]
    s.add(again := request("b", [*range(16), 7, 7], max_tokens=1))
    assert turn(s) == [("b", 2)]
    assert again.num_cached == 16


def test_a_prefix_is_found_whatever_steps_and_requests_computed_it() -> None:
    s = scheduler(prefill_chunk=8)
    s.add(request("a", list(range(20)), max_tokens=6))  # three chunks, then one token at a time: 20, 21, ...
    while s.has_work:
        turn(s)
    s.add(longer := request("b", list(range(32)), max_tokens=1))
    while s.has_work:
        turn(s)
    assert longer.num_cached == 24, "all full pages of the 25 tokens that were computed"
    s.add(again := request("c", [*range(32), 7], max_tokens=1))
    assert turn(s) == [("c", 1)]
    assert again.num_cached == 32, "two requests filled these pages"


def test_when_pages_run_out_the_youngest_waits_and_loses_nothing() -> None:
    s = scheduler(num_pages=7, page_size=4, prefill_chunk=100)  # 6 pages: 24 tokens
    a, b = request("a", [1] * 8, max_tokens=9), request("b", [2] * 8, max_tokens=9)
    s.add(a)
    s.add(b)
    while not a.finish_reason:
        assert a not in s.waiting or not a.num_output
        turn(s)
    assert s.num_preemptions >= 1
    while not b.finish_reason:
        turn(s)
    assert b.token_ids[b.num_prompt :] == list(range(8, 17))
    assert s.pages.num_used == 0


def test_who_is_paused_gives_its_slot_and_pages_to_those_who_wait_and_goes_on_later() -> None:
    s = scheduler(num_pages=7, page_size=4, max_batch=2, prefill_chunk=100)  # 6 pages: 24 tokens
    slow, other, large = request("slow", [1] * 8, 9), request("other", [2] * 4, 3), request("large", [3] * 16, 2)
    s.add(slow)
    s.add(other)
    turn(s)
    slow.paused = True
    s.add(large)
    assert turn(s) == [("large", 16), ("other", 1)]
    assert slow.slot == -1
    while s.has_work:
        turn(s)
    assert turn(s) == []
    assert slow in s.waiting
    slow.paused = False
    s.add(late := request("late", [4], 1))
    assert turn(s)[0][0] == "slow", "whoever ran before goes on first"
    while s.has_work:
        turn(s)
    assert slow.token_ids[8:] == list(range(8, 17))
    assert late.finish_reason == "length"


def test_who_runs_takes_pages_of_the_paused_before_those_of_the_youngest() -> None:
    s = scheduler(num_pages=5, page_size=4, prefill_chunk=100)  # 4 pages
    slow, young = request("slow", [1] * 7, max_tokens=9), request("young", [2] * 7, max_tokens=9)
    s.add(slow)
    s.add(young)
    turn(s)
    slow.paused = True
    assert [turn(s), turn(s)] == [[("young", 1)]] * 2, "the second one needs another page"
    assert (slow.slot, young.num_admissions) == (-1, 1)


def test_a_slot_that_a_paused_one_holds_is_free_for_those_who_wait() -> None:
    s = scheduler(max_batch=2)
    for name in "abc":
        s.add(request(name, [1, 2], max_tokens=9))
    turn(s)
    old, young = s.running
    old.paused = young.paused = True
    assert turn(s) == [("c", 2)]
    assert (old.slot, young.slot) == (0, -1), "one is enough"


def test_what_is_told_of_a_request_s_begin_is_of_the_first_one() -> None:
    s = scheduler(max_batch=1)
    s.add(r := request("a", list(range(6)), max_tokens=9))
    turn(s)
    begun = r.first_scheduled
    s._preempt(r)
    assert turn(s) == [("a", 3)], "its first page is found again"
    assert (r.num_admissions, r.num_cached, r.first_scheduled) == (2, 0, begun)
    assert (s.pages.queries, s.pages.hits) == (6, 0)


def test_finish_takes_a_waiting_request_out() -> None:
    s = scheduler()
    s.add(r := request("a", [1]))
    s.finish(r)
    assert not s.has_work
    assert s.schedule()[0].sequences == ()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=12),
    st.integers(7, 14),
    st.integers(1, 9),
    st.lists(st.integers(0, 40), max_size=5),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 40)), max_size=12),
)
def test_every_request_ends_whole_under_any_pressure(
    shapes: list[tuple[int, int, int]],
    num_pages: int,
    prefill_chunk: int,
    cancel_at: list[int],
    pauses: list[tuple[int, int]],
) -> None:
    s = scheduler(num_pages=num_pages, page_size=4, max_batch=3, prefill_chunk=prefill_chunk)
    requests = [request(str(i), [shape[0] % 3] * shape[0], shape[1]) for i, shape in enumerate(shapes)]
    arrivals = {r.id: shapes[i][2] for i, r in enumerate(requests)}
    cancelled: set[str] = set()
    for step in range(1000):
        for r in requests:
            if arrivals[r.id] == step:
                s.add(r)
        if step in cancel_at and s.running:
            cancelled.add(s.running[0].id)
            s.finish(s.running[0])
        for r in requests:
            r.paused = r.num_output > 0 and any(r.id == str(who) and 0 <= step - at < 7 for who, at in pauses)
        ran = {r.id for r in requests if not r.paused}
        assert {who for who, _ in turn(s)} <= ran
        if step > 50 and not s.has_work:
            break
    assert not s.has_work
    for r, shape in zip(requests, shapes, strict=True):
        if r.id not in cancelled:
            assert r.token_ids[r.num_prompt :] == list(range(shape[0], shape[0] + shape[1]))
    assert s.pages.num_used == 0


def test_clients_take_turns_and_not_their_sequences() -> None:
    s = scheduler(max_batch=2, prefill_chunk=100)
    many = [request(f"a{i}", [1, 2, i], max_tokens=3) for i in range(5)]
    for r in many:
        r.group = "a"
        s.add(r)
    turn(s)
    for name in ("b", "c"):
        s.add(request(name, [3, 4], max_tokens=3))
    ended: list[str] = []
    while s.has_work:
        before = {r.id for r in s.running}
        turn(s)
        ended += sorted(before - {r.id for r in s.running})
    assert ended == ["a0", "a1", "a2", "b", "a3", "c", "a4"], "who has one does not wait for all five of another's"


def test_a_queue_forgets_no_one_and_keeps_the_order_of_each_group() -> None:
    waiting, requests = Queue(), [request(str(i), [7]) for i in range(12)]
    for i, each in enumerate(requests):
        each.group = "abc"[i % 3]
        waiting.add(each)
    waiting.remove(requests[3])
    waiting.remove(requests[3])  # it is not there
    again = waiting.next([], None)
    assert again is requests[0]
    waiting.remove(again)
    waiting.put_back(again)
    assert len(waiting) == len([*waiting]) == 11
    assert waiting.next([requests[0]], None) is again, "who ran before comes first"
    waiting.remove(again)
    assert waiting.next([requests[0], requests[1]], None) is requests[2]
    assert waiting.next([], {requests[9], requests[7]}) is requests[7]
    order = []
    while waiting:
        order.append(waiting.next([r for r in order if r.group == "a"], None))
        waiting.remove(order[-1])
    assert [r for r in order if r.group == "a"] == [requests[6], requests[9]]
    assert order[:2] == [requests[1], requests[2]]


class CountedTime(float):
    """Counts how often an arrival is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedTime.compared += 1
        return float(self) == other

    def __lt__(self, other: float) -> bool:
        CountedTime.compared += 1
        return float(self) < other

    __hash__ = float.__hash__


def test_a_queue_of_many_groups_gives_them_turns_without_looking_at_all() -> None:
    """What it says is the first to arrive of the groups that have the fewest running, found by looking at all."""
    rng, waiting, running, count = random.Random(0), Queue(), list[Request](), 600
    for i in range(count):
        each = request(str(i), [7])
        each.group, each.arrival = str(i % 500), CountedTime(rng.random())
        waiting.add(each)
    turns = 0
    while waiting:
        if rng.random() < 0.2:
            waiting.remove(rng.choice([*waiting]))
            continue
        found = waiting.next(running, None)
        heads = {r.group: r for r in reversed([*waiting])}.values()
        counts = Counter(r.group for r in running)
        assert found is min(heads, key=lambda r: (counts[r.group], float(r.arrival)))
        waiting.remove(found)
        running, turns = [*running[-7:], found], turns + 1
    assert turns > 300
    assert CountedTime.compared < 100 * count


def test_a_plan_says_only_what_is_new_in_a_slot_and_after_a_preemption_everything() -> None:
    s = scheduler(num_pages=40, page_size=4, max_batch=2, prefill_chunk=100)
    for name, length in (("a", 9), ("b", 30)):
        s.add(request(name, list(range(length)), max_tokens=60))
    tables: dict[int, list[int]] = {0: [], 1: []}
    seen_whole = 0
    for _ in range(200):
        first, _ = s.schedule()
        plan, requests = s.schedule()  # until the step is computed, the same is planned
        assert set(first.sequences) <= set(plan.sequences)
        for r, part in zip(requests, plan.sequences, strict=True):
            seen_whole += part.num_placed == 0
            assert part.num_placed == 0 or len(part.new_pages) == (part.start % 4 == 0)
            assert len(part.tokens) == 1 or part.num_placed == 0
            tables[part.slot][part.num_placed :] = part.new_pages
            assert tables[part.slot] == r.pages
            r.append([r.num_tokens], 0.0)
            s.advance(r, len(part.tokens))
            if r.finish_reason:
                s.finish(r)
        s.check_integrity()
    assert not s.has_work
    assert s.num_preemptions > 0
    assert seen_whole == 2 + s.num_preemptions


def test_a_slot_is_kept_while_a_request_runs_and_rows_are_in_order_of_slots() -> None:
    s = scheduler(max_batch=3, prefill_chunk=100)
    for name, max_tokens in (("a", 9), ("b", 2), ("c", 9), ("d", 9)):
        s.add(request(name, [1, 2, 3], max_tokens))
    assert [turn(s) for _ in range(4)][1:] == [
        [("a", 1), ("b", 1), ("c", 1)],
        [("a", 1), ("d", 3), ("c", 1)],  # d has the slot of b
        [("a", 1), ("d", 1), ("c", 1)],
    ]


def test_drafts_take_no_page_from_anybody_and_none_past_the_end_is_computed() -> None:
    s = scheduler(num_pages=5, page_size=4, prefill_chunk=100)  # 4 pages
    a, b = request("a", [1] * 7, max_tokens=6), request("b", [2] * 7, max_tokens=6)
    for r in (a, b):
        s.add(r)
    turn(s)
    a.drafts = b.drafts = (5, 5)
    plan, _ = s.schedule()
    assert [part.tokens for part in plan.sequences] == [(7,), (7,)], "no page is free"
    s.finish(b)
    a.drafts = (5,) * 9
    plan, _ = s.schedule()
    assert plan.sequences[0].tokens == (7, 5, 5, 5, 5), "one more token than drafts may come"
    assert plan.sequences[0].num_logits == 5
    a.append([5, 5, 6], 0.0)
    s.advance(a, 3)
    assert (a.num_computed, a.num_tokens, a.drafts) == (10, 11, ())
    s.check_integrity()
    a.max_tokens, a.end_ids, a.drafts = 20, frozenset({8}), (8, 8)
    plan, _ = s.schedule()
    a.append([8, 8, 8], 0.0)  # the first ends it
    s.advance(a, len(plan.sequences[0].tokens))
    assert a.finish_reason == "stop"
    assert (a.num_computed, a.num_tokens) == (12, 12), "what was dropped does not count"


def test_no_draft_is_verified_where_the_sequence_is_computed_anew() -> None:
    s = Scheduler(PageAllocator(50, 4), 4, 100, long_from=10, computed_anew=True)
    r = request("a", [1] * 7, max_tokens=20)
    s.add(r)
    turn(s)
    assert s.room_for_drafts(r, 9) == 2, "the tokens up to number 10"
    r.drafts = (5,) * 9
    plan, _ = s.schedule()
    assert plan.sequences[0].tokens == (7, 5, 5)
    r.append([5, 6], 0.0)
    s.advance(r, 2)
    assert s.room_for_drafts(r, 9) == 0
    assert [turn(s), turn(s), turn(s)] == [[("a", 1)], [], [("a", 11)]]
    assert (r.num_admissions, s.num_preemptions) == (2, 1), "number 11 makes it long"
    assert s.room_for_drafts(r, 9) == 9


def test_who_became_long_just_before_it_gave_its_pages_back_is_computed_as_a_long_one() -> None:
    s = Scheduler(PageAllocator(7, 4), 4, 100, long_from=8, computed_anew=True)
    old, young = request("old", [1] * 12, max_tokens=6), request("young", [2] * 8, max_tokens=9)
    s.add(old)
    s.add(young)
    assert turn(s) == [("old", 12), ("young", 8)], "six pages of six; both have one token more now"
    assert turn(s) == [("old", 1)], "which takes the page that the younger one had"
    assert (young.num_tokens, young.rope_len, young.slot) == (9, 8, -1)
    s.finish(old)
    plan, _ = s.schedule()
    assert [(part.start, part.end, part.rope_len) for part in plan.sequences] == [(0, 9, 9)]


def test_what_is_called_a_prompt() -> None:
    """Its last token alone is. Several that were generated, and are computed again, are as those of a prompt."""
    scheduler = Scheduler(PageAllocator(20, 4, prefix_cache=False), 2, prefill_chunk=5)
    own = request("r", [5] * 11, max_tokens=9)
    scheduler.add(own)

    def step() -> tuple[int, int, bool]:
        (plan,) = scheduler.schedule()[0].sequences
        if plan.num_logits:
            own.token_ids.append(7)
        scheduler.advance(own, len(plan.tokens))
        return plan.start, len(plan.tokens), plan.is_prompt

    assert [step() for _ in range(5)] == [(0, 5, True), (5, 5, True), (10, 1, True), (11, 1, False), (12, 1, False)]
    scheduler._preempt(own)
    assert [step() for _ in range(4)] == [(0, 5, True), (5, 5, True), (10, 4, True), (14, 1, False)]
