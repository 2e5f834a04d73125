"""Batches of a TensorDataset for a GPU: rows of copies that the GPU holds, or gathered in page-locked memory ahead.

A copy from other memory to the GPU waits for it: the host does not run ahead, and the GPU waits for each batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from rubberband.executor.training.failures import is_out_of_memory
from rubberband.executor.training.loading import Part
from rubberband.executor.training.sampler import Indices

MOST_OF_GPU = 0.2
"""The largest part of the GPU's memory that datasets take."""
_MOST_OF_FREE = 0.5
"""The largest part of what is free after the first step: models may grow, and evaluation has batches of its own."""


@dataclass(frozen=True, slots=True)
class _Copy:
    tensor: Tensor
    version: int
    """The tensor's, when it was copied."""
    there: Tensor
    filled: Future[None]


class Residence:
    """Copies of datasets on the GPU of one worker. They are made after the first step, which shows what else is needed.

    Tensors that other code may write to without torch's notice, such as those of `torch.from_numpy`, are not copied.
    """

    def __init__(
        self,
        device: torch.device,
        memory: Callable[[], tuple[int, int]] = torch.cuda.mem_get_info,
        *,
        share: float = 1.0,
        pool: Executor | None = None,
    ) -> None:
        """`memory` returns the bytes that are free, and all bytes, of the GPU; `share` is the worker's part of both.

        `pool` copies, by default in a thread.
        """
        self.device = device
        self._share = share
        self._memory = memory
        self._copies: dict[int, _Copy] = {}
        self._refused: set[int] = set()
        self._pool = pool or ThreadPoolExecutor(1, "rubberband copies")
        self._steps = 0
        self._is_over = False

    @property
    def has_copies(self) -> bool:
        """Whether any dataset takes memory of the GPU."""
        return bool(self._copies)

    def begin_step(self) -> None:
        """Note that a step, or an evaluation, begins."""
        self._steps += 1

    def rows(self, tensors: Sequence[Tensor], where: Indices) -> list[Tensor] | None:
        """Return rows of the copies; None if they are not there, not yet or no more."""
        if self._is_over or self._steps < 2 or not self._claims(tensors):
            return None
        copies = [self._copies[id(each)] for each in tensors]
        if any(copy.version != copy.tensor._version for copy in copies):  # a hook has changed it
            self.leave()
            return None
        if not all(copy.filled.done() for copy in copies):
            return None
        if any(copy.filled.exception() for copy in copies):
            self.leave()
            return None
        rows = _pinned(torch.from_numpy(where), self.device).to(self.device, non_blocking=True)
        return [copy.there[rows] for copy in copies]

    def leave(self) -> bool:
        """Give the memory back, for good; return whether there was any."""
        wait([copy.filled for copy in self._copies.values()])
        had_any = self.has_copies
        self._copies.clear()
        self._is_over = True
        return had_any

    def close(self) -> None:
        self.leave()
        self._pool.shutdown()

    def _claims(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all these tensors are, or will be, on the GPU."""
        new = {id(each): each for each in tensors if id(each) not in self._copies}
        if not new:
            return True
        if not new.keys().isdisjoint(self._refused) or not self._has_room(new.values()):
            self._refused.update(new)
            return False
        for key, each in new.items():
            try:
                there = torch.empty_like(each, device=self.device)
            except torch.OutOfMemoryError:
                self.leave()
                return False
            begun = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
            self._copies[key] = _Copy(each, each._version, there, self._pool.submit(_fill, there, each, begun))
        return True

    def _has_room(self, new: Collection[Tensor]) -> bool:
        if not all(map(_is_owned, new)):
            return False
        free, total = (self._share * each for each in self._memory())
        size = sum(each.nbytes for each in new)
        held = sum(copy.tensor.nbytes for copy in self._copies.values())
        return held + size <= MOST_OF_GPU * total and size <= _MOST_OF_FREE * free


class GpuRows:
    """The rows of a TensorDataset, batch by batch."""

    def __init__(self, dataset: TensorDataset, residence: Residence) -> None:
        self._dataset = dataset
        self._residence = residence
        self._pool = ThreadPoolExecutor(1, "rubberband rows")
        self._due: deque[Indices] = deque()
        self._further: Iterator[Part] = iter(())
        self._next: _Gathered | None = None

    def expect(self, parts: Sequence[Indices], ahead: Callable[[], Iterator[Part]]) -> None:
        """Note that `parts` are loaded next, in this order, and what `ahead` says after them."""
        self._due, self._further = deque(parts), ahead()
        self._residence.begin_step()

    def follow(self) -> None:
        """Gather no row that code other than torch's may have changed since."""
        if not all(map(_is_owned, self._dataset.tensors)):
            self._next = None

    def load(self, part: Indices, place: Callable[[Indices], Indices]) -> list[Tensor]:
        """Return the rows of a part as a batch on the GPU; `place` returns their places in the tensors."""
        where, tensors = place(part), self._dataset.tensors
        found = self._residence.rows(tensors, where)
        if found is not None:
            self._next = None
            return found
        gathered = self._next if self._next is not None and self._next.is_of(tensors, where) else None
        batch = self._gathered(tensors, where) if gathered is None else gathered.rows.result()
        moved = [each.to(self._residence.device, non_blocking=True) for each in batch]
        if self._due and np.array_equal(self._due[0], part):
            self._due.popleft()
            later = self._due[0] if self._due else next((each.indices for each in self._further), None)
            self._next = None if later is None else self._ahead(tensors, place(later))
        return moved

    def leave(self) -> bool:
        return self._residence.leave()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._residence.close()

    def _ahead(self, tensors: Sequence[Tensor], where: Indices) -> _Gathered:
        versions = [_version(each) for each in tensors]
        return _Gathered(tensors, versions, where, self._pool.submit(self._gathered, tensors, where))

    def _gathered(self, tensors: Sequence[Tensor], where: Indices) -> list[Tensor]:
        """Return rows in page-locked memory."""
        rows = torch.from_numpy(where)
        return [_gather(each, rows, self._residence.device) for each in tensors]


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Rows that are being gathered ahead."""

    tensors: Sequence[Tensor]
    versions: Sequence[int]
    where: Indices
    rows: Future[list[Tensor]]

    def is_of(self, tensors: Sequence[Tensor], where: Indices) -> bool:
        """Whether they are those rows of those tensors, as these are now."""
        are_same = [*map(id, self.tensors)] == [*map(id, tensors)]
        return are_same and np.array_equal(self.where, where) and self.versions == [_version(each) for each in tensors]


def _is_owned(tensor: Tensor) -> bool:
    """Whether torch counts all changes of the tensor: no NumPy array, file or process shares its memory."""
    storage = tensor.untyped_storage()
    return _is_plain(tensor) and storage.resizable() and not storage.is_shared() and not tensor.is_inference()


def _is_plain(tensor: Tensor) -> bool:
    is_usual = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_usual and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _fill(there: Tensor, tensor: Tensor, begun: torch.cuda.Event | None) -> None:
    """Copy a tensor to memory that is free when the GPU is at `begun`, beside the training. In a thread."""
    if begun is None:
        there.copy_(tensor)
        return
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().wait_event(begun)
        there.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()


def _gather(tensor: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Return rows in page-locked memory, with the layout that `tensor[rows]` has. In a thread, or not."""
    if not _is_plain(tensor):
        return tensor[rows]
    try:
        if device.type == "cuda" and tensor.is_contiguous():
            found = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu", pin_memory=True)
            return torch.index_select(tensor, 0, rows, out=found)
        return _pinned(tensor[rows], device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return tensor[rows]  # the host has no more memory to lock


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor
