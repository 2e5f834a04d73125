"""`rubberband.distributed` and `rubberband.per_worker`, as they are seen without starting a worker."""

from __future__ import annotations

import pytest

import rubberband
from rubberband.executor import Entrypoint, is_function
from rubberband.executor.training.distributed import GANGS, is_distributed

SOURCE = """
import rubberband
from rubberband import distributed

@rubberband.distributed
def one(config): ...

@distributed
def other(config): ...

def plain(config): ...
"""


@pytest.mark.parametrize(("workers", "gangs", "share"), [(None, None, 64), ("4", None, 16), ("1", "1,2,4", 64)])
def test_a_batch_is_divided_among_the_workers(monkeypatch, workers, gangs, share):
    for name, value in (("WORLD_SIZE", workers), (GANGS, gangs)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert rubberband.per_worker(64) == share


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("WORLD_SIZE", "4", "a multiple of 4, or write resources.gpus_per_trial: {sizes: [1, 2, 3]}"),
        (GANGS, "1,4", "a multiple of 4, or write resources.gpus_per_trial: {sizes: [1]}"),
        (GANGS, "1,2,3,4", "a multiple of 12, or write resources.gpus_per_trial: {sizes: [1, 2, 3]}"),
        (GANGS, "4,8", "a multiple of 8"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused_also_when_fewer_workers_check_it(monkeypatch, name, found, remedy):
    monkeypatch.setenv(name, found)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text follows
        rubberband.per_worker(30)
    assert str(caught.value) == (
        f"per_worker(30): a batch of 30 cannot be divided equally among 4 workers, which a trial may get; give {remedy}"
    )


def test_a_batch_is_refused_for_a_gang_between_those_that_divide_it(monkeypatch):
    monkeypatch.setenv(GANGS, "1,2,3,4")
    with pytest.raises(ValueError, match=r"among 3 workers.* multiple of 12, or write .*: {sizes: \[1, 2, 4\]}"):
        rubberband.per_worker(64)
    monkeypatch.setenv(GANGS, "1,2,4")
    assert rubberband.per_worker(64) == 64


def test_a_distributed_function_may_have_many_gpus_and_others_one(tmp_path):
    (tmp_path / "marked.py").write_text(SOURCE)
    for name, distributed in (("one", True), ("other", True), ("plain", False)):
        entrypoint = Entrypoint.parse(f"marked:{name}", [tmp_path])
        assert is_function(entrypoint) is not distributed
        assert is_distributed(entrypoint.load()) is distributed
        if distributed:
            entrypoint.check(8)
        else:
            with pytest.raises(rubberband.EntrypointError, match=r"write @rubberband\.distributed above it"):
                entrypoint.check(8)


def test_the_mark_goes_with_a_function_that_is_sent_by_value():
    @rubberband.distributed
    def train(config):
        return None

    sent = Entrypoint.from_object(train)
    assert sent.pickled is not None
    assert is_distributed(sent.load())
