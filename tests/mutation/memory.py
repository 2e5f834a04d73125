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
)
