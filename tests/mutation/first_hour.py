"""Bugs in what a new user meets first: the installation, the first commands, and their words."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_CORE = "tests/integration/test_core_alone.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="tests-in-the-users-home",
        harm="after a run, tests fail by the start times that it measured",
        file="tests/conftest.py",
        old='os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))',
        new="pass",
        tests=("tests/unit/test_documents.py::test_tests_read_nothing_of_the_users_home",),
    ),
    Mutant(
        name="virtual-losses-rise",
        harm="a rehearsal with mode: min calls the trial with the worst loss the winner",
        file="executor/virtual/backend.py",
        old='return by if job.mode == "max" else',
        new='return by if job.mode == "min" else',
        tests=("tests/unit/test_virtual_cloud.py",),
    ),
    Mutant(
        name="moved-folder-unnoticed",
        harm="a run whose folder is moved away buys instances that cannot start, and ends with an error about them",
        file="executor/run/session.py",
        old="if found() != began_in:",
        new="if found() is None:",
        tests=("tests/unit/test_surroundings.py",),
    ),
    Mutant(
        name="boolean-metric",
        harm="a metric that is True or False counts as 1.0 or 0.0, and luck chooses the winner",
        file="executor/training/runner.py",
        old='return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")',
        new="return False",
        tests=("tests/unit/test_trial.py::test_the_metric_must_be_there_and_finite",),
    ),
    Mutant(
        name="cell-is-told-of-flags",
        harm="the error in a cell that runs again names a flag of the shell",
        file="rubberband/running/run.py",
        old='folder.require_free("pass new=True, which takes the next free name, or another name=")',
        new="folder.require_free()",
        tests=("tests/unit/test_run_new.py",),
    ),
    Mutant(
        name="nameless-runs-collide",
        harm="two runs without a name in one minute: the second is refused",
        file="rubberband/running/run.py",
        old='if new or not {"name", "experiment"} & words.keys():',
        new="if new:",
        tests=("tests/unit/test_run_new.py",),
    ),
    Mutant(
        name="frames-of-ours",
        harm="an error of tune() shows dozens of frames before the line that counts",
        file="rubberband/errors.py",
        old="raise error.with_traceback(None)  # noqa",
        new="raise error  # noqa",
        tests=("tests/unit/test_run_new.py",),
    ),
    Mutant(
        name="cpu-type-is-a-slip",
        harm="a user of CPU instances is sent to a GPU at six times the price",
        file="cloud/catalogue.py",
        old="    if is_cpu_type(name):\n        without",
        new="    if False:\n        without",
        tests=("tests/unit/test_catalogue.py",),
    ),
    Mutant(
        name="core-runs-without-ray",
        harm="on an installation of the core alone, a run ends in a trace-back, after it has written files",
        file="rubberband/spec/experiment.py",
        old='require_ray(f"resources.provider: {self.resources.provider}", *drivers)',
        new="pass",
        tests=(_CORE,),
    ),
    Mutant(
        name="extra-of-another",
        harm="the command that a hint gives does not install what is missing",
        file="rubberband/installation.py",
        old='"client": "httpx httpx_sse",',
        new='"server ": "httpx httpx_sse",',
        tests=(_CORE,),
    ),
)
