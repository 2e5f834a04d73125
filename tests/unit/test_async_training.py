"""The pure parts of asynchronous training: shards, tickets and clocks, the order of updates, memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor import TrialFailure
from rubberband.executor.training.asynchronous.protocol import Order, Pace, Tally
from rubberband.executor.training.asynchronous.shards import check_memory, largest_share, shards_of
from rubberband.values.asynchronous import AsyncUse

SIZES = st.lists(st.integers(0, 10**9), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 6))
def test_every_tensor_is_on_one_server_and_bytes_are_balanced(sizes: list[int], servers: int) -> None:
    shards = shards_of(sizes, servers)
    assert sorted(number for shard in shards for number in shard) == list(range(len(sizes)))
    heaviest = max(sum(sizes[number] for number in shard) for shard in shards)
    # Graham's bound of the rule, over what no division can beat.
    assert heaviest <= (4 / 3) * max(*sizes, sum(sizes) / servers, 0) + max(sizes) / 3
    assert largest_share(sizes, servers) == (heaviest / sum(sizes) if sum(sizes) else 1.0)


def test_shards_are_balanced_by_bytes_not_by_count() -> None:
    assert shards_of([100, 1, 1, 1, 97], 2) == ((0,), (1, 2, 3, 4))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["work", "work", "work", "join", "leave"]), st.integers(0, 99)), max_size=80
)


@given(ACTIONS, st.integers(1, 4) | st.none())
def test_every_batch_is_taken_once_whoever_comes_and_goes(
    actions: list[tuple[str, int]], staleness: int | None
) -> None:
    pace = Pace(staleness, until_updates=60)
    taken: Counter[int] = Counter()
    names = iter(range(1000))
    present: list[str] = []
    made: dict[str, int] = {}
    for action, choice in actions:
        if action == "join" or not present:
            present.append(f"{next(names)}")
            made[present[-1]] = min((made[each] for each in present[:-1]), default=0)
            pace.join(present[-1], 1 + choice % 3)
            continue
        worker = present[choice % len(present)]
        if action == "leave":
            pace.leave(worker)
            present.remove(worker)
        elif pace.is_over:
            assert pace.number() is None
        elif pace.may_begin(worker):
            if staleness:
                assert made[worker] - min(made[each] for each in present) <= staleness
            ticket = pace.held[worker][0]
            number = pace.number()
            assert number == sum(taken.values())
            taken[ticket] += 1
            made[worker] += 1
            pace.used(worker)
        else:
            assert made[worker] > min(made[each] for each in present)
    state = pace.state()
    held = [ticket for each in state["held"].values() for ticket in each]
    assert Counter(range(state["next_ticket"])) == taken + Counter([*held, *state["returned"]])


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_worker_begins_at_most_the_bound_ahead_of_the_slowest_one(staleness: int) -> None:
    pace = Pace(staleness, until_updates=99)
    pace.join("fast")
    pace.join("slow")
    begun = 0
    while pace.may_begin("fast"):
        pace.number()
        pace.used("fast")
        begun += 1
    assert begun == staleness + 1
    assert pace.may_begin("slow")
    pace.number()
    pace.used("slow")
    assert pace.may_begin("fast")


def test_the_position_of_the_data_stays_as_it_was_while_workers_go_on() -> None:
    pace = Pace(None, until_updates=9)
    pace.join("a", 2)
    pace.join("b")
    before = pace.state()
    pace.number()
    pace.used("a")
    pace.leave("b")
    assert before == {"next_ticket": 3, "held": {"a": [0, 1], "b": [2]}, "returned": []}
    assert pace.state() == {"next_ticket": 4, "held": {"a": [1, 3]}, "returned": [2]}


def test_workers_that_share_a_batch_begin_it_together() -> None:
    pace = Pace(0, until_updates=3)
    pace.join("a")
    pace.join("b")
    assert pace.begin("a") == pace.begin("b") == ("a", "b")
    pace.join("c")
    assert pace.begin("c") == ()  # it comes too late for this one
    pace.end_round(["a", "b"])
    assert pace.may_begin("a")
    assert pace.begin("a") == ("a", "b", "c")
    assert pace.number() == 1


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 4, 6]))
def test_an_iteration_ends_with_exactly_its_updates(order: list[int], size: int) -> None:
    updates = Order(3, list(range(0, 13, size)))
    waiting, ended = list(order), []
    while waiting:
        number = next(each for each in waiting if updates.may_apply(each))  # there is always one
        waiting.remove(number)
        done = updates.done(number)
        assert done == (len(order) - len(waiting) == size * (len(ended) + 1))
        if done:
            ended.append(updates.end())
            updates.closed = ended[-1]
    assert ended == list(range(4, 4 + 12 // size))


def test_servers_wait_for_rank_0_at_the_second_iteration_it_has_not_closed() -> None:
    order = Order(0, [0, 1, 2, 3])
    for number in (0, 1):
        assert order.may_apply(number)
        assert order.done(number)
        order.end()
    assert not order.may_apply(2)
    assert not order.may_apply_unclosed(2)
    assert order.waits
    order.closed = 1
    assert order.may_apply(2)
    assert order.may_apply_unclosed(2)
    assert not order.waits


def test_the_times_of_an_iteration_are_means_over_its_updates() -> None:
    tally = Tally(began_at=10.0)
    times = {"compute_s": 1.0, "up_s": 2.0, "wait_s": 0.0, "server_s": 1.0, "down_s": 3.0}
    tally.note({"": 2.0, "loss": 3.0}, None, 0)
    tally.note({"": 1.0, "loss": 1.0}, times, 3)
    tally.updates = 2
    use = AsyncUse(servers=1, **tally.use(2, 14.0))  # type: ignore[arg-type]
    assert (use.updates_per_s, use.compute_s, use.down_s) == (0.5, 1.0, 3.0)
    assert (use.staleness, use.max_staleness, use.workers) == (1.5, 3, 2)
    assert tally.sums == {"": 3.0, "loss": 4.0}


def test_a_shard_that_exceeds_the_memory_is_refused() -> None:
    check_memory(10**9, 2, 10**11)
    with pytest.raises(TrialFailure) as refused:
        check_memory(2 * 10**9, 4, 10**10)
    assert str(refused.value) == (
        "a parameter server needs 28.0 GB for its shard of 2.00 GB and 4 workers, and 10.0 GB are free on its machine; "
        "raise training.servers, or use instances with more memory"
    )
