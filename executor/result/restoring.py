"""The trained trial of a finished run, in this process: from its checkpoint, without Ray and without a gang."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar, cast
from zipfile import is_zipfile

from rubberband.errors import CheckpointError, CheckpointLostError, InputError
from rubberband.executor.checkpoints import store_of
from rubberband.executor.checkpoints.folders import FolderCheckpoint, is_archive, read_manifest
from rubberband.executor.checkpoints.folders import unpack as unpack_folder
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.training.distributed import is_distributed
from rubberband.executor.training.entrypoint import Code, Entrypoint
from rubberband.executor.training.failures import one_line
from rubberband.executor.training.runner import check_device, expect, unpack, unpickled
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.torch_trial import TorchTrial, override_of
from rubberband.executor.training.trial import TrainFunction, Trial, TrialContext
from rubberband.files import make_directories
from rubberband.installation import require
from rubberband.spec.program import Program
from rubberband.units import shown

_Content = TypeVar("_Content")


def restore_trial(trained: TrialResult, target: Code | str, *, is_simulated: bool, device: str = "cpu") -> Any:
    """Return the trial as its checkpoint left it; see `Result.load_best`.

    Raises InputError for a run without checkpoints, EntrypointError for no trial, CheckpointError if the checkpoint is
    missing or does not fit.
    """
    with _checkpoint(trained, is_simulated) as path:
        if isinstance(target, str):
            target = cast("Code", Entrypoint.parse(target, (os.getcwd(),)).load())
        if isinstance(target, type) and issubclass(target, TorchTrial):
            return _torch(trained, target, path, device)
        if isinstance(target, type) and issubclass(target, Trial):
            return _plain(trained, target, path, device)
        if isinstance(target, Program):
            raise InputError("load_best() loads trials in Python; result.save_best(folder) writes a program's files")
        if isinstance(target, type) or not callable(target):
            raise InputError(
                f"load_best() got {shown(target)}; give the trial's class or function, or module:attribute of it"
            )
        return _function(trained, target, path, device)


def save_files(trained: TrialResult, folder: str | os.PathLike[str], *, is_simulated: bool) -> Path:
    """Write the files of the trial's checkpoint into a folder, or its model into a file; see `Result.save_best`.

    Raises InputError for a run without checkpoints, a trial without files, and a folder with files; CheckpointError if
    the checkpoint is missing or the folder cannot be written.
    """
    place = Path(folder).absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{folder} is there, and is not overwritten; give an empty or new folder, or a new file")
    with _checkpoint(trained, is_simulated) as path:
        kind = read_manifest(path)["kind"] if is_archive(path) else None
        if kind == "function":  # such as one with a Trainer
            state = _state(unpack(path, kind, trained.iterations, "cpu"), "cpu")
            if isinstance(state, FolderCheckpoint):
                return _written(state, place)
        if kind == "torch" or (kind is None and is_zipfile(path)):
            return _save_model(trained, path, place / "model.pt" if place.is_dir() else place)
        if kind != "program":
            raise InputError(f"trial {trained.trial} is Python, with no folder of files; result.load_best() loads it")
        if not unpack_folder(path, place)["files"]:
            raise InputError(f"trial {trained.trial} saved no files: its program wrote nothing to ${{checkpoint}}")
    return place


def _save_model(trained: TrialResult, path: Path, file: Path) -> Path:
    """Write the state_dict of a TorchTrial's model, for `torch.load` with weights_only or for safetensors."""
    import torch

    from rubberband.executor.training.checkpoint import read

    is_safe = file.suffix == ".safetensors"
    if is_safe:
        require(file.name, "safetensors")
    state = expect(read(path), "torch", trained.iterations)["model"]
    try:
        make_directories(file.parent)
        if is_safe:
            _save_safetensors(state, file)
        else:
            torch.save(state, str(file))
            torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError:
        file.unlink()
        raise InputError("the model's state holds objects of its own classes; result.load_best() loads it") from None
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{file} cannot be written: {one_line(error)}; give another path") from error
    return file


def _save_safetensors(state: Mapping[str, Any], file: Path) -> None:
    """Write tensors, each with its own content, as the format has no tensors that share memory.

    Raises InputError for what the format cannot hold, and OSError.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, seen = dict[str, torch.Tensor](), set[int]()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            kind = type(value).__name__ if not isinstance(value, torch.Tensor) else f"tensor of {value.layout}"
            raise InputError(f"safetensors has dense tensors only, and {name} is a {kind}; write a .pt file instead")
        place = value.untyped_storage().data_ptr()
        tensors[name] = value.clone(memory_format=torch.contiguous_format) if place in seen else value.contiguous()
        seen.add(place)
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        file.unlink(missing_ok=True)
        raise OSError(one_line(error)) from error
    except (KeyError, ValueError) as error:
        file.unlink(missing_ok=True)
        raise InputError(f"safetensors cannot hold the model ({one_line(error)}); write a .pt file instead") from error


def _written(files: FolderCheckpoint, place: Path) -> Path:
    try:
        return files.to_directory(place)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise CheckpointError(f"{place} cannot be written: {error.strerror or error}; make room there") from error


def kept_state(trained: TrialResult) -> Any:
    """Return what the trial passed with its latest checkpoint: of a function, or from `Trial.save`; None if nothing.

    Raises InputError for a run without checkpoints, CheckpointError if the checkpoint is missing.
    """
    with _checkpoint(trained, is_simulated=False) as path:
        kind = read_manifest(path)["kind"] if is_archive(path) else unpickled(path.read_bytes(), "cpu").get("kind")
        content = unpack(path, kind, trained.iterations, "cpu")
    return _state(content, "cpu") if kind == "function" else content["state"]


def _state(content: Mapping[str, Any], device: str) -> Any:
    """Return the object that a function passed last; None if it passed none."""
    state = content["state"]
    return None if state is None else unpickled(state, device, content.get("folders", ()))


@contextmanager
def _checkpoint(trained: TrialResult, is_simulated: bool) -> Iterator[Path]:
    """Yield the file of the trial's checkpoint."""
    ref = trained.checkpoint
    if is_simulated or (ref is not None and ref.url.startswith("virtual:")):
        raise InputError(
            "a virtual run trains no model, so there is none to load; run it with resources.provider: local or aws"
        )
    if ref is None:
        raise InputError(f"trial {trained.trial} has no checkpoint: it did not finish an iteration")
    store = store_of(ref)
    store.read_mark()
    with ExitStack() as stack:
        try:
            path = stack.enter_context(store.file(ref))
        except CheckpointLostError as error:
            raise CheckpointLostError(f"{error}; put it back, or run the experiment again") from error
        yield path


def _torch(trained: TrialResult, target: type[TorchTrial], path: Path, device: str) -> TorchTrial:

    from rubberband.executor.training.checkpoint import Model, TrainedParameters, on_device, read

    check_device(device)
    try:
        loaded = read(path)
    except CheckpointError as error:
        raise _unlike(target, error) from error
    content = _checked(lambda: expect(loaded, "torch", trained.iterations), target)
    trial = target()
    trial.max_iterations = trained.iterations
    reseed("setup", content["seed"])
    model = trial.build_model(dict(trained.configuration)).to(device)
    load = override_of(trial, "load_state_dict")
    try:
        Model(model, device).load_state_dict(content["model"])
        TrainedParameters(model).load_state_dict(content["parameters"])
        if load is not None and "trial" in content:
            reseed("setup", content["seed"])
            trial.build_optimizer(dict(trained.configuration), model)  # which may make what the state is loaded into
            load(on_device(content["trial"], content["trial_on_host"], device))
    except Exception as error:
        raise _unlike(target, error) from error
    trial.config, trial.model = trained.configuration, model.eval()
    for method in ("train_dataset", "eval_dataset"):
        vars(trial)[method] = partial(_dataset, trial, method, content["data_seed"])
    return trial


def _dataset(trial: TorchTrial, method: str, data_seed: int, *args: Any, **kwargs: Any) -> Any:
    """Make a dataset as the trained trial did."""
    reseed("data", data_seed)
    return getattr(type(trial), method)(trial, *args, **kwargs)


def _plain(trained: TrialResult, target: type[Trial], path: Path, device: str) -> Trial:
    content = _checked(lambda: unpack(path, "trial", trained.iterations, device), target)
    context = TrialContext(
        trial=trained.trial,
        rank=0,
        num_workers=1,
        seed=trained.seed,
        device="cuda" if device.startswith("cuda") else "cpu",
        iterations=trained.iterations,
        rendezvous=None,
    )
    trial = target()
    reseed("setup", trained.seed)
    try:
        trial.setup(dict(trained.configuration), context)
        trial.load(content["state"])
    except BaseException:
        trial.close()
        raise
    return trial


def _function(trained: TrialResult, target: TrainFunction, path: Path, device: str) -> Any:
    if is_distributed(target):
        return _checked(lambda: FolderCheckpoint.from_archive(path), target)
    content = _checked(lambda: unpack(path, "function", trained.iterations, device), target)
    if content["state"] is None:
        raise InputError(
            f"trial {trained.trial} reported without a checkpoint, so there is nothing to load; pass checkpoint= to "
            "rubberband.report()"
        )
    return _state(content, device)


def _checked(content: Callable[[], _Content], target: Code) -> _Content:
    try:
        return content()
    except CheckpointError as error:
        raise _unlike(target, error) from error


def _unlike(target: Code, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split()) if isinstance(error, CheckpointError) else one_line(error)
    what = "class" if isinstance(target, type) else "function"
    return CheckpointError(
        f"the checkpoint does not fit {target.__qualname__}: {reason}; give the {what} that was trained"
    )


def save_artifacts(trained: TrialResult, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a trial's artifacts into a folder; see `Result.save_artifacts`."""
    if not trained.artifacts:
        raise InputError(f"trial {trained.trial} has no artifacts; its code gives files to rubberband.artifact(path)")
    top, paths = Path(folder).absolute(), list[Path]()
    for artifact in trained.artifacts:
        path = (top / artifact.name).resolve()
        if not path.is_relative_to(top.resolve()):
            raise InputError(f"the artifact {artifact.name!r} leaves {folder}, and is not written")
        if path.exists():
            raise InputError(f"{path} is there, and is not overwritten; give an empty or new folder")
        paths.append(path)
    for artifact, path in zip(trained.artifacts, paths, strict=True):
        try:
            make_directories(path.parent)
            with store_of(artifact.file).file(artifact.file) as source:
                shutil.copyfile(source, path)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror or error}; give another folder"
            ) from error
    return paths
