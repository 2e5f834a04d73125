"""State that a Trainer of Hugging Face changes in training and saves nowhere: a trial keeps it in its checkpoint.

These are frozen parameters, the counts of the user's callbacks, and what a subclass such as TRL's SFTTrainer keeps in
attributes: numbers, lists, tensors, and random generators.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from rubberband.integrations import trainer_files
from rubberband.units import counted

_FILE = "rubberband.pickle"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class BesideState:
    """State of a Trainer beside its own files, of each worker of a gang."""

    def __init__(self, transformers: Any, trainer: Any, most: int | None) -> None:
        """`most`: samples at once, for later segments; None: as many as the Trainer has in a batch."""
        self._trainer, self._most = trainer, most
        self._callbacks = [
            callback
            for callback in trainer.callback_handler.callbacks
            if not type(callback).__module__.startswith("transformers.")
            and not isinstance(callback, transformers.trainer_callback.ExportableState)
        ]
        self._of_trainer = frozenset(_names_in(transformers.Trainer))
        """Attributes that the Trainer itself has, and saves or makes anew."""
        self._changed = set[str]()
        """Attributes that training has changed, here or before the checkpoint."""
        self._begun = dict[str, bytes]()
        self._others = dict[str, int]()
        """Attributes whose state is not known -> identity of their objects."""

    def begin(self) -> None:
        """Take note of all attributes before the first step: those that training changes are saved."""
        for name, value in self._attributes():
            try:
                self._begun[name] = _digest(_state(value))
            except UnknownState:
                self._others[name] = id(value)

    def save(self, model: Any, folder: Path) -> None:
        """Write it beside the Trainer's files. Every worker of a gang calls it."""
        frozen = [name for name, weights in model.named_parameters() if not weights.requires_grad]
        counts = [
            (type(callback).__qualname__, {name: value for name, value in vars(callback).items() if _is_plain(value)})
            for callback in self._callbacks
        ]
        states = trainer_files.gathered(self._changes())
        (folder / _FILE).write_bytes(pickle.dumps((frozen, counts, states, self._most, _batch_of(self._trainer))))

    def restore(self, model: Any, folder: Path, rank: int) -> None:
        """Restore it, after the callbacks' own `on_train_begin`.

        In a gang of another size all workers have the numbers of the first one; tensors and random generators, which
        are those of one worker's data, begin anew.
        """
        frozen, counts, states, _, batch = pickle.loads((folder / _FILE).read_bytes())
        for name, weights in model.named_parameters():
            if weights.requires_grad == (name in frozen):
                weights.requires_grad = name not in frozen
        for callback, (kind, values) in zip(self._callbacks, counts, strict=False):  # the code may have changed
            if type(callback).__qualname__ == kind:
                vars(callback).update(values)
        if batch != (now := _batch_of(self._trainer)):
            trainer_files.remark(
                f"a step has {now} samples on {counted(self._trainer.args.world_size, 'worker')}, and had {batch} "
                "before, so the trial learns otherwise; give TrainingArguments "
                "per_device_train_batch_size=rubberband.per_worker(SAMPLES)"
            )
        if len(states) == self._trainer.args.world_size:
            found = states[rank]
        else:
            found = {name: value for name, value in states[0].items() if _is_plain(value)}
        for name, state in found.items():
            self._changed.add(name)
            _restore(self._trainer, name, state, self._trainer.args.device)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in vars(self._trainer).items() if name not in self._of_trainer)

    def _changes(self) -> dict[str, Any]:
        """Return the states of the attributes that training has changed."""
        found = dict[str, Any]()
        for name, value in self._attributes():
            try:
                state = _state(value)
            except UnknownState:
                if self._others.get(name, id(value)) != id(value):
                    trainer_files.remark(
                        f"{type(self._trainer).__name__}.{name} changes in training and is not saved: "
                        f"{type(value).__name__} is neither plain data nor a tensor, so a resume begins it anew"
                    )
                    del self._others[name]
                continue
            if name in self._changed or _digest(state) != self._begun.get(name):
                self._changed.add(name)
                found[name] = state
        return found


def most_remembered(folder: Path) -> int | None:
    """Return with how many samples at once the segment before had the memory; None: with whole batches."""
    most: int | None = pickle.loads((folder / _FILE).read_bytes())[3]
    return most


def _batch_of(trainer: Any) -> int:
    """Return the samples of a step, on all workers."""
    args = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _digest(state: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(state)).digest()


class UnknownState(Exception):
    """An object whose state is not known to be plain data."""


class _Attributes(dict[str, Any]):
    """State of an object: the states of its attributes."""


class _Generator(tuple[Any, ...]):
    """State of a generator of random numbers."""


class _OfDevice(tuple[Any, ...]):
    """Tensor that was on the worker's device, here on the CPU."""


def _names_in(kind: type) -> Iterator[str]:
    """Yield the names of attributes in the methods of a class."""
    for member in vars(kind).values():
        code = getattr(inspect.unwrap(getattr(member, "fget", None) or member), "__code__", None)
        if code is not None:
            yield from _names_of(code)


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _state(value: Any) -> Any:
    """Return the state of an attribute, as data that pickle keeps. Raises UnknownState.

    An object has the state of its attributes. Objects within lists and dicts have none.
    """
    try:
        return _part(value)
    except UnknownState:
        if isinstance(value, type | _module()) or not hasattr(value, "__dict__"):
            raise
    return _Attributes({name: _part(inner) for name, inner in vars(value).items()})


def _part(value: Any) -> Any:
    """Return the state of data or of a random generator. Raises UnknownState."""
    import numpy as np
    import torch

    if isinstance(value, torch.Generator):
        return _Generator([value.get_state()])
    if isinstance(value, random.Random):
        return _Generator([value.getstate()])
    if isinstance(value, np.random.Generator):
        return _Generator([value.bit_generator.state])
    return _data(value)


def _data(value: Any) -> Any:
    """Return plain data, tensors, arrays and what contains them. Raises UnknownState."""
    import numpy as np
    import torch

    if _is_plain(value) or (isinstance(value, np.ndarray | np.generic) and value.dtype != object):
        return value
    if isinstance(value, dict) and all(map(_is_plain, value)):
        return {key: _data(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_data, value))
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        kept = value.detach().cpu()
        return kept if value.device.type == "cpu" else _OfDevice([kept])
    raise UnknownState


def _module() -> type:
    import torch

    return torch.nn.Module


def _restore(owner: Any, name: str, state: Any, device: Any) -> None:
    """Give an attribute its state; objects stay the same, as others may have them too."""
    value = getattr(owner, name, None)
    if isinstance(state, _Attributes):
        for inner, part in state.items() if value is not None else ():
            _restore(value, inner, part, device)
    elif isinstance(state, _Generator):
        _restore_generator(value, *state)
    elif isinstance(value, dict) and isinstance(state, Mapping):
        value.clear()
        value.update(_placed(state, device))
    elif isinstance(value, list) and isinstance(state, list):
        value[:] = _placed(state, device)
    else:
        setattr(owner, name, _placed(state, device))


def _restore_generator(generator: Any, state: Any) -> None:
    import torch

    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif generator is not None:
        generator.bit_generator.state = state


def _placed(state: Any, device: Any) -> Any:
    """Return data with its tensors where they were: on the CPU, or on this worker's device."""
    if isinstance(state, _OfDevice):
        return state[0].to(device)
    if _is_plain(state):
        return state
    if isinstance(state, dict):
        return {key: _placed(inner, device) for key, inner in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_placed(inner, device) for inner in state)
    return state
