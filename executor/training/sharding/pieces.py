"""Checkpoints of divided models: the file of each worker has its pieces of the tensors, for a gang of any size.

Each file is an archive (`checkpoints/folders.py`) with `rank-N.data`, the pieces one after another, and `rank-N.json`,
which lists them: the tensor's name, type and shape, the first element of the piece and its size along each dimension,
and its place in the data. The file of rank 0 has `state.pt` too: all else of the checkpoint, with a `Whole` in the
place of each divided tensor. Its manifest says how many workers there were. Files are mapped, and a worker reads from
them what it needs. All files of a checkpoint may be joined into one.
"""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints.folders import members, read_manifest, write_archive
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.training.failures import one_line

_ALIGNED_BYTES = 64
_STATE = "state.pt"
_DATA, _INDEX = ".data", ".json"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: what one worker has of it."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    start: tuple[int, ...]
    """The first element of the box, along each dimension."""
    values: Tensor


@dataclass(frozen=True, slots=True)
class Whole:
    """A divided tensor in the small part of a checkpoint."""

    name: str


class Divided:
    """A divided tensor of a checkpoint, in all of its pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.shape, self.dtype = pieces[0].shape, pieces[0].values.dtype
        self._pieces = pieces

    @property
    def is_complete(self) -> bool:
        """Whether it has all of its elements."""
        return sum(piece.values.numel() for piece in self._pieces) == math.prod(self.shape)

    def fill(self, box: Tensor, start: Sequence[int]) -> None:
        """Copy what lies in a box of the tensor, whose first element is `start`."""
        for piece in self._pieces:
            low = [max(pair) for pair in zip(start, piece.start, strict=True)]
            ends = zip(start, box.shape, piece.start, piece.values.shape, strict=True)
            high = [min(one + size, other + length) for one, size, other, length in ends]
            if all(first < last for first, last in zip(low, high, strict=True)):
                box[_slices(low, high, start)].copy_(piece.values[_slices(low, high, piece.start)])

    def whole(self) -> Tensor:
        """Return all of it, in host memory."""
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill(found, (0,) * len(self.shape))
        return found


def _slices(low: Sequence[int], high: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first - own, last - own) for first, last, own in zip(low, high, start, strict=True))


def mapped(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return a state whose leaves, each with its path, are what `change` returns; containers are copied."""
    if type(value) in (dict, OrderedDict, defaultdict):
        made = copy.copy(value)  # with attributes such as a state_dict's _metadata
        for key, item in value.items():
            made[key] = mapped(item, change, f"{name}/{key}" if name else str(key))
        return made
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change, f"{name}/{at}" if name else str(at)) for at, item in enumerate(value))
    return change(name, value)


def write(
    state: Any,
    pieces: Mapping[str, Piece],
    to: Path,
    *,
    iterations: int,
    rank: int,
    workers: int,
    wait: Callable[[], None],
) -> str:
    """Write the file of one worker, once `wait` returns; `state` is what rank 0 keeps beside its pieces.

    Returns its SHA-256. Raises OSError, and CheckpointError for what cannot be pickled.
    """
    wait()
    sources: dict[str, bytes | Path] = {}
    if rank == 0:
        file = io.BytesIO()
        try:
            torch.save(state, file)
        except Exception as error:
            raise CheckpointError(f"the checkpoint cannot be pickled: {type(error).__name__}: {error}") from error
        sources[_STATE] = file.getvalue()
    with Scratch() as folder:
        index = _write_data(pieces, folder / f"rank-{rank}{_DATA}")
        sources |= {"": folder, f"rank-{rank}{_INDEX}": json.dumps(index).encode()}
        return write_archive(sources, to, kind="torch", iterations=iterations, workers=workers, torch=torch.__version__)


def _write_data(pieces: Mapping[str, Piece], path: Path) -> list[dict[str, Any]]:
    index = []
    with open(path, "wb") as file:
        for name, piece in pieces.items():
            file.seek(-(-file.tell() // _ALIGNED_BYTES) * _ALIGNED_BYTES)
            size = list(piece.values.shape)
            dtype = str(piece.values.dtype).removeprefix("torch.")
            place = {"start": piece.start, "size": size, "at": file.tell()}
            index.append({"name": name, "dtype": dtype, "shape": piece.shape, **place})
            content: Any = piece.values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            file.write(content)
    return index


def read(payload: bytes | Path, parts: Sequence[bytes | Path] = ()) -> Any:
    """Return the content of a checkpoint, with a `Divided` for each divided tensor. Raises CheckpointError."""
    manifest = read_manifest(payload)
    if manifest.get("kind") != "torch":
        return manifest  # `expect` says of what kind it is
    try:
        state, tensors = _contents([payload, *parts], int(manifest["workers"]))
        content = torch.load(io.BytesIO(state), map_location="cpu", weights_only=False)
        return mapped(content, lambda _, value: tensors[value.name] if isinstance(value, Whole) else value)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint cannot be read by torch {torch.__version__} ({one_line(error)}); it is of torch "
            f"{manifest.get('torch')}: install that version"
        ) from error


def read_whole(payload: bytes | Path, parts: Sequence[bytes | Path] = ()) -> Any:
    """Return the content of a checkpoint as that of one worker, with all tensors whole. Raises CheckpointError."""
    return mapped(read(payload, parts), lambda _, value: value.whole() if isinstance(value, Divided) else value)


def _contents(payloads: Iterable[bytes | Path], workers: int) -> tuple[bytes, dict[str, Divided]]:
    """Return the small state and the divided tensors, by name."""
    state = b""
    pieces: dict[str, list[Piece]] = {}
    missing = {f"rank-{rank}{_INDEX}" for rank in range(workers)}
    for payload in payloads:
        places, data = members(payload), _bytes_of(payload)
        own = {name: data[at : at + size] for name, (at, size) in places.items()}
        state = own[_STATE].numpy().tobytes() if _STATE in own else state
        for name in missing & own.keys():
            missing.remove(name)
            for row in json.loads(own[name].numpy().tobytes()):
                pieces.setdefault(row["name"], []).append(_piece(row, own[name.removesuffix(_INDEX) + _DATA]))
    if missing or not state:
        raise CheckpointError(
            f"the checkpoint is of {workers} workers, and lacks {min(missing, default=_STATE)}; a file of it is missing"
        )
    tensors = {name: Divided(found) for name, found in pieces.items()}
    for name, tensor in tensors.items():
        if not tensor.is_complete:
            raise CheckpointError(f"the checkpoint has only a part of {name}; a file of it is missing")
    return state, tensors


def _piece(row: Mapping[str, Any], data: Tensor) -> Piece:
    dtype = getattr(torch, row["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{row['name']} has the unknown type {row['dtype']}")
    values = data[row["at"] : row["at"] + math.prod(row["size"]) * dtype.itemsize].view(dtype).view(row["size"])
    return Piece(tuple(row["shape"]), tuple(row["start"]), values)


def _bytes_of(payload: bytes | Path) -> Tensor:
    """Return the bytes of a file, which is mapped; they must not be changed."""
    if isinstance(payload, bytes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that they cannot be changed
            return torch.frombuffer(payload, dtype=torch.uint8)
    try:
        return torch.from_file(str(payload), shared=False, size=payload.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint cannot be read: {' '.join(str(error).split())}") from error
