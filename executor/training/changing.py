"""A checkpoint of another configuration: what follows from the present one, and what the checkpoint keeps.

A trial may continue from a checkpoint that another configuration has trained (a fork). Optimizers and LR schedules come
from the checkpoint, with the settings of that configuration. So each checkpoint also has these settings as they were
built, and where those of the present configuration differ, they take their place. Momentum and other states stay.

A value that training has changed since, such as a learning rate in the middle of its schedule, changes by the ratio of
the two built ones. That is exact for schedules that multiply the learning rate.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rubberband.units import shown

if TYPE_CHECKING:
    from rubberband.executor.training.loop import TorchRunner

_PARTS = ("parameters", "optimizer", "scheduler")
"""Parts of a checkpoint that may follow from the configuration, in addition to the model."""
_MOST_NAMED = 3
_LONGEST = 200
"""Characters of a reason."""


class Built:
    """The configuration of a trial, and the settings of its optimizers and LR schedules as it builds them."""

    def __init__(self, loop: TorchRunner, configuration: Mapping[str, Any]) -> None:
        """`configuration` is as it was before the trial's methods were called with it."""
        self._by_batch = loop.trial.scheduler_step == "batch"
        states = {
            "parameters": loop.components["parameters"].state_dict(),
            "optimizer": _without_tensors(loop.optimizers.state_dict()),
            "scheduler": loop.schedule.state_dict(),
        }
        self.state: dict[str, Any] = {
            "configuration": configuration,
            "kinds": [type(each).__name__ for each in loop.optimizers.members],
            "total_steps": loop.schedule.total_steps,
            **states,
        }
        with suppress(Exception):  # what cannot be copied is refused by the first checkpoint
            self.state = copy.deepcopy(self.state)

    def changes(self, content: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return parameter -> (value that trained a checkpoint, present value), of those that differ."""
        before = content.get("built", self.state)["configuration"]
        now = self.state["configuration"]
        names = dict.fromkeys([*now, *before])
        return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}

    def carried(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a checkpoint with the settings that follow from the present configuration."""
        if not self.changes(content):
            self.state = copy.deepcopy(content.get("built", self.state))
            return content
        before, now = content["built"], self.state
        found = {**content, **{part: carried(content.get(part), before[part], now[part]) for part in _PARTS}}
        if before["kinds"] != now["kinds"]:  # another optimizer begins without a state
            found["optimizer"] = _begun(content["optimizer"], before["optimizer"], now["optimizer"])
        if self._by_batch and before["total_steps"] != now["total_steps"]:
            found["scheduler"] = _moved(found["scheduler"], now["total_steps"] / before["total_steps"])
        return found


def misfit(changes: Mapping[str, tuple[Any, Any]], reason: str) -> str:
    """Return that a checkpoint does not fit, for this reason; first, how its configuration differs."""
    if not changes:
        return f"the checkpoint does not fit the trial: {reason}"
    named = [f"{name} {_short(was)} -> {_short(now)}" for name, (was, now) in list(changes.items())[:_MOST_NAMED]]
    more = f" and {len(changes) - _MOST_NAMED} more" if len(changes) > _MOST_NAMED else ""
    return (
        f"the checkpoint is of another configuration ({', '.join(named)}{more}) and does not fit the trial; what "
        "shapes the model cannot change while it trains: name only others in search.scheduler.mutate "
        f"({reason[:_LONGEST]})"
    )


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shown(value)


def carried(held: Any, built: Any, now: Any) -> Any:
    """Return the value to continue with: of `held`, what differs between `built` and `now` follows from `now`.

    Examples:
        >>> carried({"lr": 0.05, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.2, "momentum": 0.9})
        {'lr': 0.1, 'momentum': 0.9}
    """
    if _same(built, now):
        return held
    if all(isinstance(each, dict) for each in (held, built, now)):
        names = [*held, *(name for name in now if name not in held and name not in built)]
        made = copy.copy(held)  # also a Counter or a defaultdict
        made.clear()
        made.update({name: _item(name, held, built, now) for name in names if name in now or name not in built})
        return made
    if all(isinstance(each, (list, tuple)) for each in (held, built, now)) and len(built) == len(now) <= len(held):
        first = [carried(*each) for each in zip(held, built, now, strict=False)]
        added = [_added(each, built, now) for each in held[len(now) :]]
        return type(held)([*first, *added])
    if _same(held, built):
        return now
    return _by_ratio(held, built, now)


def _item(name: Any, held: Mapping[Any, Any], built: Mapping[Any, Any], now: Mapping[Any, Any]) -> Any:
    if name not in held:
        return now[name]
    return carried(held[name], built[name], now[name]) if name in built and name in now else held[name]


def _added(group: Any, built: Sequence[Any], now: Sequence[Any]) -> Any:
    """Return a group of parameters that was added in training, changed as the first group is."""
    if not isinstance(group, Mapping) or not built or not isinstance(built[0], Mapping):
        return group
    changed = {name for name in group if name in built[0] and not _same(built[0][name], now[0].get(name))}
    return {
        name: _by_ratio(value, built[0][name], now[0][name]) if name in changed and name != "params" else value
        for name, value in group.items()
    }


def _by_ratio(held: Any, built: Any, now: Any) -> Any:
    numbers = (int, float, Tensor)
    if any(isinstance(each, bool) or not isinstance(each, numbers) for each in (held, built, now)):
        return now
    return held * now / built if float(built) else now


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool((one == other).all()) if isinstance(one, Tensor) and isinstance(other, Tensor) else False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _without_tensors(state: Any) -> Any:
    """Return the state of optimizers without what they have of each parameter."""
    if "param_groups" in state:
        return {**state, "state": {}}
    return {name: _without_tensors(each) for name, each in state.items()}


def _begun(held: Any, built: Any, now: Any) -> Any:
    """Return the state of another optimizer at the place of the schedule, which its learning rates follow."""
    if "param_groups" not in now:
        return {name: _begun(held[name], built[name], each) for name, each in now.items()} if held else now
    groups = zip(held["param_groups"], built["param_groups"], now["param_groups"], strict=False)
    begun = [{**own, "lr": _at_place(one["lr"], was["lr"], own["lr"])} for one, was, own in groups]
    return {**now, "param_groups": begun}


def _at_place(held: Any, built: Any, now: Any) -> Any:
    return held if _same(built, now) else _by_ratio(held, built, now)


def _moved(state: Any, ratio: float) -> Any:
    """Return LR schedules at the same part of their way, which takes `ratio` times as many steps."""
    if isinstance(state, Mapping):
        moved = {name: _moved(each, ratio) for name, each in state.items()}
        if isinstance(moved.get("last_epoch"), int):
            moved["last_epoch"] = round(ratio * moved["last_epoch"])
        return moved
    return [_moved(each, ratio) for each in state] if isinstance(state, list) else state
