"""Attributes that a model, a trial or a dataset changes while it trains: no checkpoint holds them, so they begin anew.

They are plain values, and objects with a state: schedules, averaged models, random generators, objects of the user's
own classes. One that changed in the first iteration of a check, and is not restored, is looked at in short iterations:
it is remembered if it differs after two iterations from what it is where a restore came between them. A dataset's
random generators are looked at even where they did not change here, as loader workers have their own.
"""

from __future__ import annotations

import random
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rubberband.executor.training.comparing import shorten
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.loop import TorchRunner
from rubberband.executor.training.torch_trial import TorchTrial, override_of

if TYPE_CHECKING:
    from rubberband.executor.training.entrypoint import Entrypoint
    from rubberband.executor.training.segment import Segment

_MOST = 1000
"""Elements of a list, array or tensor that is looked at."""
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "torchvision", "transformers", "rubberband")
_OF_MODULES = frozenset(vars(nn.Module()))
_OBJECT = "object "
"""Begins the mark of an object: to read it says nothing, as most are read in every iteration."""
_DEEPEST = 4
_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


class AttributePlace(NamedTuple):
    """An attribute: of what it is, the path of that, its class, and the name."""

    owner: str
    path: str
    kind: str
    name: str


Attributes = dict[AttributePlace, str]


def attributes_of(runner: TorchRunner) -> Attributes:
    """Return the attributes of the user's own modules, optimizers and schedules, of the trial, and of the dataset.

    Plain ones of a trial that has its own `state_dict` are left out; of a dataset only random generators count.
    """
    owners: list[tuple[str, str, Any]] = [("model", *pair) for pair in runner.module.named_modules()]
    owners += [("optimizer", str(at), each) for at, each in enumerate(runner.optimizers.members)]
    schedules = runner.schedule.members
    owners += [("schedule", str(at), each) for at, each in enumerate(schedules)]
    owners.append(("trial", "", runner.trial))
    has_own = override_of(runner.trial, "state_dict") is not None
    restored = {id(runner.module), *(id(each) for each in (*runner.optimizers.members, *schedules))}
    found = {}
    for owner, path, each in owners:
        if type(each).__module__.split(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(each).items():
            known = name in _OF_MODULES if owner == "model" else owner == "trial" and hasattr(TorchTrial, name)
            if known or id(value) in restored:
                continue
            mark = _mark(value)
            if mark is not None and owner == "trial" and has_own:
                continue
            if mark is None and (state := _state(value)) is not None:
                mark = _OBJECT + state
            if mark is not None:
                found[AttributePlace(owner, path, type(each).__name__, name)] = mark
    for path, kind, name, generator in _generators(runner.feed.dataset):
        found[AttributePlace("dataset", path, kind, name)] = f"{_OBJECT}{_random_state(generator)}"
    return found


def _generators(owner: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (path, class, attribute, generator) of the random generators that an object and those in it hold."""
    for name, value in getattr(owner, "__dict__", {}).items():
        for each in value if isinstance(value, (list, tuple)) and len(value) <= _MOST else [value]:
            if _random_state(each) is not None:
                yield path, type(owner).__name__, name, each
            elif depth < _DEEPEST and not isinstance(each, (type, ModuleType)):
                yield from _generators(each, f"{path}{name}.", depth + 1)


def _random_state(value: Any) -> str | None:
    if isinstance(value, torch.Generator):
        return str(hash(value.get_state().numpy().tobytes()))
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.get_state()) if isinstance(value, np.random.RandomState) else None


def _state(value: Any, depth: int = 0) -> str | None:
    """Return a text that shows a change of an object's state; None for one that has none that is known."""
    if depth > _DEEPEST or isinstance(value, (type, ModuleType)):
        return None
    if (mark := _mark(value)) is not None or (mark := _random_state(value)) is not None:
        return mark
    if isinstance(value, torch.Tensor):
        numbers = value.detach().double()
        return f"{tuple(value.shape)} {numbers.sum().item():.7g} {numbers.norm().item():.7g}"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        value = value.state_dict()
    elif _is_of_the_user(type(value)):
        value = vars(value) if hasattr(value, "__dict__") else ()
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if not isinstance(value, (list, tuple, deque)):
        return None
    marks = [mark for each in value if (mark := _state(each, depth + 1)) is not None]
    return repr(marks) if marks else None


def _is_of_the_user(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not file.startswith(_INSTALLED) and kind.__module__.split(".")[0] not in _LIBRARIES


def _mark(value: Any) -> str | None:
    """Return a text that shows a change of a plain value; None for other objects."""
    if isinstance(value, (bool, int, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (float, complex, np.generic)):
        return f"{value:.4g}" if isinstance(value, (float, complex, np.floating)) else repr(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        return _mark(value.tolist()) if size <= _MOST else None
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if not isinstance(value, (list, tuple, set, frozenset, deque)) or len(value) > _MOST:
        return None
    marks = [mark for each in value if (mark := _mark(each)) is not None]
    return None if len(marks) < len(value) else repr(sorted(marks) if isinstance(value, (set, frozenset)) else marks)


def changed(before: Attributes, after: Attributes) -> set[AttributePlace]:
    """Return the attributes that differ, or are new."""
    return {place for place, mark in after.items() if before.get(place) != mark}


def remembered(entrypoint: Entrypoint, segment: Segment, among: set[AttributePlace]) -> list[AttributePlace]:
    """Return those of the attributes that begin anew after a restore."""
    segment = replace(segment, until_iterations=2, batch=None, verify=False)
    until, payload, _ = _trained(entrypoint, segment, None, set())
    restored, _, read = _trained(entrypoint, replace(segment, from_iterations=1), payload, among)
    found = [place for place in among & until.keys() if until[place] != restored.get(place) or place in read]
    if not found:
        return []
    again, _, _ = _trained(entrypoint, replace(segment, from_iterations=1), payload, set())
    random = changed(restored, again)  # times, and what draws other numbers each time
    return sorted(place for place in found if place not in random)


def _trained(
    entrypoint: Entrypoint, segment: Segment, payload: bytes | None, among: set[AttributePlace]
) -> tuple[Attributes, bytes, set[AttributePlace]]:
    """Train to the second iteration; return the attributes then, the checkpoint before it, and what it read first."""
    target = entrypoint.load()
    assert isinstance(target, type)
    trial: TorchTrial = target()
    shorten(trial, segment)
    runner = TorchRunner(trial, segment, Gang(0, 1, None))
    try:
        runner.begin(payload)
        if payload is None:
            dumped = runner.dump(1, runner.iterate(1), is_last=True)
            assert callable(dumped)
            with tempfile.TemporaryDirectory(prefix="rubberband-") as folder:
                dumped(file := Path(folder, "checkpoint"))
                payload = file.read_bytes()
        begun = attributes_of(runner)
        own = {place.name: place for place in among if place.owner == "trial" and _is_plain(begun.get(place))}
        read = _watch(trial, own.keys())
        runner.iterate(2)
        return attributes_of(runner), payload, {own[name] for name in read}
    finally:
        runner.close()


def _is_plain(mark: str | None) -> bool:
    return mark != "None" and not (mark or "").startswith(_OBJECT)


def _watch(trial: TorchTrial, names: Collection[str]) -> set[str]:
    """Return a set that gets the attributes of the trial, of those names, that are read before they are set."""
    read, known = set[str](), set[str]()
    kind: Any = type(trial)

    class Watched(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in names and name not in known:
                read.add(name)
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            known.add(name)
            super().__setattr__(name, value)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Watched, name, getattr(kind, name))
    trial.__class__ = Watched
    return read


def remark(places: Sequence[AttributePlace]) -> str:
    """Return the line that names the attributes, with the fix."""
    names = ", ".join(dict.fromkeys(f"{place.kind}.{place.name}" for place in places[:3]))
    restored = "and restore it in load_state_dict()"
    fix = {
        "model": f"register it as a buffer (register_buffer), or return it in the trial's state_dict() {restored}",
        "dataset": "draw from torch, NumPy or random without a generator: they follow from the seed and the iteration",
    }.get(places[0].owner, f"return it in state_dict() of the {places[0].owner} {restored}")
    return (
        f"{names}: training changes {'this attribute' if len(places) == 1 else 'these attributes'}, and no checkpoint "
        f"has the value, so it begins anew after each SYNC or restart; {fix}"
    )
