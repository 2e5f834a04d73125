"""The queue of a service: owners take turns by their weights, and none of them waits without end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.experiments.starting import Queue

OWNERS = "abcd"


def started(queue: Queue, owners: dict[str, str], number: int) -> str:
    """The owners of those that start in a single slot, one after the other."""
    found = []
    for _ in range(number):
        name = queue.next({})
        assert name is not None
        queue.drop(name)
        queue.took_turn(owners[name])
        found.append(owners[name])
    return "".join(found)


def queue_of(arrivals: str, **weights: float) -> tuple[Queue, dict[str, str]]:
    """A queue into which experiments of these owners came, one after the other."""
    queue, owners = Queue(weights), {f"{owner}-{number}": owner for number, owner in enumerate(arrivals)}
    for name, owner in owners.items():
        queue.put(name, owner)
    return queue, owners


def test_owners_take_turns_and_each_ones_experiments_keep_their_order() -> None:
    queue, owners = queue_of("aaaaabbc")
    assert started(queue, owners, 8) == "abcabaaa"
    assert queue.next({}) is None
    queue, _ = queue_of("aab")
    assert [queue.next({}, without) for without in ((), {"a-0"}, {"a-0", "a-1"})] == ["a-0", "a-1", "b-2"]
    queue.put("a-0", "a")
    assert list(queue) == ["a-0", "a-1", "b-2"]


def test_a_slot_goes_to_the_owner_with_fewest_running_for_its_weight() -> None:
    queue, _ = queue_of("aab", a=2.0)
    assert queue.next({"a": 1, "b": 1}) == "a-0"
    assert queue.next({"a": 2, "b": 0}) == "b-2"


def test_one_slot_is_shared_by_weights() -> None:
    queue, owners = queue_of("a" * 20 + "b" * 20, a=3.0)
    assert Counter(started(queue, owners, 16)) == {"a": 12, "b": 4}


def test_an_owner_saves_no_turns_while_it_asks_none() -> None:
    queue, owners = queue_of("a" * 40)
    started(queue, owners, 20)
    for number in range(20):
        owners[f"b-{number}"] = "b"
        queue.put(f"b-{number}", "b")
    assert started(queue, owners, 8) in ("babababa", "baababab")


class Slots:
    """A service with some slots, and what it starts."""

    def __init__(self, slots: int, weights: dict[str, float]) -> None:
        self.queue, self.slots, self.weights = Queue(weights), slots, weights
        self.running: deque[str] = deque()
        self.waiting: Counter[str] = Counter()
        self.passed: dict[str, Counter[str]] = {}
        """Owner that waits and has none running -> starts of each other one since."""

    def arrive(self, owner: str, name: str) -> None:
        self.queue.put(name, owner)
        self.waiting[owner] += 1

    def start(self) -> None:
        while len(self.running) < self.slots and (name := self.queue.next(Counter(self.running))) is not None:
            owner, running = name[0], Counter(self.running)
            least = min(running[one] / self.weights[one] for one in self.waiting if self.waiting[one])
            assert running[owner] / self.weights[owner] == least
            self.queue.drop(name)
            self.queue.took_turn(owner)
            self.waiting[owner] -= 1
            for other in OWNERS:
                if self.waiting[other] and not running[other] and other != owner:
                    self.passed.setdefault(other, Counter())[owner] += 1
                else:
                    self.passed.pop(other, None)
            for other, passed in self.passed.items():
                for one, number in passed.items():  # since its latest turn began, at most one turn's virtual time
                    assert number <= 1 + self.weights[one] / self.weights[other] + 1e-9
            self.running.append(owner)


@given(
    st.integers(1, 3),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(OWNERS), max_size=len(OWNERS)),
    st.lists(st.one_of(st.sampled_from(OWNERS), st.integers(0, 2)), max_size=60),
)
def test_no_owner_is_passed_over_without_end(slots: int, weights: Sequence[float], story: list[str | int]) -> None:
    """A letter: an experiment of that owner arrives; a number: that one of those that run ends."""
    service = Slots(slots, dict(zip(OWNERS, weights, strict=True)))
    for number, happens in enumerate(story):
        if isinstance(happens, str):
            service.arrive(happens, f"{happens}-{number}")
        elif happens < len(service.running):
            del service.running[happens]
        service.start()
    while service.running:
        service.running.popleft()
        service.start()
    assert not len(service.queue)
