"""Planted bugs of tensors on GPUs: where a checkpoint puts them, what evaluation sees, memory that runs out."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="evaluate-keeps-casts",
        harm="with bf16, evaluate() measures the weights twice that it swapped, and trials are ranked by it",
        file="executor/training/loop.py",
        old="autocast(keeps_casts=False)",
        new="autocast()",
        tests=("tests/unit/test_evaluation.py",),
    ),
    Mutant(
        name="gpu-tensors-need-a-gpu",
        harm="load_best() of a function that trained on a GPU fails on a laptop",
        file="executor/training/runner.py",
        old="return self._storage if is_storage else",
        new="return",
        tests=("tests/unit/test_results.py::test_tensors_of_a_gpu_are_loaded_where_there_is_none",),
    ),
    Mutant(
        name="device-of-load-best-ignored",
        harm="load_best(device=) of a function loads on the CPU",
        file="executor/training/restoring.py",
        old='return unpickled(content["state"], device)',
        new='return unpickled(content["state"], "cpu")',
        tests=("tests/unit/test_results.py::test_tensors_of_a_gpu_are_loaded_where_there_is_none",),
    ),
    Mutant(
        name="checkpoint-loaded-onto-the-gpu",
        harm="after each SYNC Adam waits for the GPU twice per parameter in every step",
        file="executor/training/loop.py",
        old='map_location="cpu", weights_only=False)',
        new="map_location=self._device, weights_only=False)",
        tests=("tests/unit/test_restoring_devices.py",),
    ),
    Mutant(
        name="all-own-tensors-to-the-gpu",
        harm="a trial that keeps the state of a generator fails at its first SYNC on a GPU",
        file="executor/training/parameters.py",
        old="and next(numbers) in host:",
        new="and next(numbers) in ():",
        tests=("tests/unit/test_restoring_devices.py",),
    ),
    Mutant(
        name="own-tensors-left-in-host-memory",
        harm="load_state_dict() of a trial gets its average in host memory, and the next step fails",
        file="executor/training/parameters.py",
        old="torch.load(content, map_location=device, weights_only=False)",
        new="torch.load(content, weights_only=False)",
        tests=("tests/unit/test_restoring_devices.py",),
    ),
    Mutant(
        name="too-large-a-copy-is-kept",
        harm="every worker keeps page-locked memory of three times its largest model, until the host has none",
        file="executor/training/host_copy.py",
        old="            HostCopy._memory.unlock()",
        new="            return",
        tests=("tests/unit/test_checkpoints_behind.py",),
    ),
    Mutant(
        name="full-gpu-not-known-in-evaluation",
        harm="an evaluation on a full GPU fails the trial, where smaller batches would do",
        file="executor/training/evaluation.py",
        old="loader.halve() if is_out_of_memory(error) else 0",
        new="loader.halve() if isinstance(error, torch.OutOfMemoryError) else 0",
        tests=("tests/unit/test_evaluation.py",),
    ),
    Mutant(
        name="nccl-without-memory-is-an-echo",
        harm="the gang's lack of memory is told as another worker's loss, without the remedy",
        file="executor/training/runner.py",
        old="is_broken_collective(error) and not _lacks_memory(error)",
        new="is_broken_collective(error)",
        tests=("tests/unit/test_out_of_memory.py",),
    ),
)
