"""Planted bugs of programs as trials: iterations skipped, lines lost, processes and secrets left behind."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_PROGRAMS = "tests/integration/test_programs.py"
_OLDER = f"{_PROGRAMS}::test_a_program_that_resumes_from_older_files_is_started_at_their_iterations"
_FILE = f"{_PROGRAMS}::test_each_line_of_a_file_is_read_once_and_whole"
_LAST = f"{_PROGRAMS}::test_a_last_line_counts_without_its_end"
_PLACES = (
    "tests/unit/test_program_gang.py"
    "::test_workers_that_come_in_any_order_have_their_places_and_the_gpus_of_their_machine"
)
_RUNNER = "executor/training/command_runner.py"
_PRINTED = "executor/training/printed.py"
_GANG = "executor/training/program_gang.py"
_GUARD = "executor/training/guard.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="iterations-of-the-stage-for-those-of-the-files",
        harm="a program that is given ${iterations} skips those after its last files",
        file=_RUNNER,
        old='"iterations": str(self._state_iterations)',
        new='"iterations": str(segment.from_iterations)',
        tests=(_OLDER,),
    ),
    Mutant(
        name="secrets-masked-after-the-cut",
        harm="the journal and the report keep the end of a token that a program prints",
        file=_RUNNER,
        old='self._masked(" | ".join(line.strip() for line in tuple(self._printed.last)))',
        new='" | ".join(line.strip() for line in tuple(self._printed.last))',
        tests=(f"{_PROGRAMS}::test_a_failure_whose_last_lines_are_cut_has_no_part_of_a_secret",),
    ),
    Mutant(
        name="lines-of-the-stage-before-read-again",
        harm="metrics that a program has written before count as those of new iterations",
        file=_PRINTED,
        old="self._file_inode, self._file_known = self._file.stat().st_ino, self._file.read_bytes()",
        new="pass",
        tests=(_FILE,),
    ),
    Mutant(
        name="lines-of-a-file-torn",
        harm="an iteration is missed where a program writes a line in two parts",
        file=_PRINTED,
        old="(self._file_rest + content).split",
        new="content.split",
        tests=(_FILE,),
    ),
    Mutant(
        name="last-line-without-an-end-lost",
        harm="the last iteration of a program does not count",
        file=_PRINTED,
        old="self._add([rests[output]] if rests[output] else [], time.time(), reads=reads)",
        new="pass",
        tests=(_LAST,),
    ),
    Mutant(
        name="training-and-validation-mixed",
        harm="a training loss and a validation loss count as two iterations, and are compared at a SYNC",
        file=_PRINTED,
        old="is_another_kind(text, before, self._metric)",
        new="False",
        tests=(f"{_PROGRAMS}::test_lines_of_training_and_of_validation_do_not_count_alike_in_a_run",),
    ),
    Mutant(
        name="filtered-losses-are-results",
        harm="a trial that has diverged reports a loss of 0, and wins",
        file="executor/training/runner.py",
        old="if value == 0.0 or is_known:",
        new="if is_known:",
        tests=("tests/unit/test_trial.py::test_the_metric_must_be_there_and_finite",),
    ),
    Mutant(
        name="a-trainer-filters-its-losses",
        harm="a diverged trial with a Trainer of Hugging Face reports a loss of 0, and wins",
        file="rubberband/integrations/transformers.py",
        old="trainer.args.logging_nan_inf_filter = False",
        new="pass",
        tests=("tests/unit/test_transformers.py::test_a_loss_that_is_no_number_fails_its_trial",),
    ),
    Mutant(
        name="no-small-negative-value-tried",
        harm="half of a search space is lost, as argparse takes -1.4e-05 for an option",
        file="rubberband/running/check.py",
        old="*below[-1:]]",
        new="]",
        tests=("tests/unit/test_program_check.py::test_small_negative_values_are_tried",),
    ),
    Mutant(
        name="booleans-always-true",
        harm="trials with a parameter that is false train with it, and the report says otherwise",
        file="rubberband/values/command.py",
        old='booleans.split("/")[not value]',
        new='booleans.split("/")[0]',
        tests=("tests/unit/test_command.py",),
    ),
    Mutant(
        name="gpus-of-a-machine-sorted-as-texts",
        harm="two workers of a gang train on the same GPU of a machine with more than ten",
        file=_GANG,
        old="masks = [each.gpus for each in here if each.gpus is not None]",
        new="masks = sorted(each.gpus for each in here if each.gpus is not None)",
        tests=(_PLACES,),
    ),
    Mutant(
        name="local-rank-counted-over-machines",
        harm="a gang on two machines asks for GPUs that the second one lacks",
        file=_GANG,
        old="local_rank=here.index(worker)",
        new="local_rank=worker.rank",
        tests=(_PLACES,),
    ),
    Mutant(
        name="workers-ranked-as-they-come",
        harm="programs get places and GPUs of other workers",
        file=_GANG,
        old="for rank in sorted(lines):",
        new="for rank in lines:",
        tests=(_PLACES,),
    ),
    Mutant(
        name="the-first-of-each-machine-reports",
        harm="a gang on two machines stands still: its third worker waits for an answer to its report",
        file="executor/training/reporting.py",
        old='os.environ.get("RANK", "0") != "0"',
        new='os.environ.get("LOCAL_RANK", "0") != "0"',
        tests=("tests/unit/test_program_gang.py",),
    ),
    Mutant(
        name="only-a-shell-is-told-to-end",
        harm="a program below a shell is killed without its signal to end",
        file=_GUARD,
        old="        os.killpg(program, number)",
        new="        os.kill(program, number)",
        tests=(f"{_PROGRAMS}::test_a_program_below_a_shell_has_time_to_end",),
    ),
    Mutant(
        name="killed-with-its-shell",
        harm="a program below a shell has no time to end after its signal",
        file=_GUARD,
        old="and _has_group(program) and",
        new="and not _has_group(program) and",
        tests=(f"{_PROGRAMS}::test_a_program_below_a_shell_has_time_to_end",),
    ),
    Mutant(
        name="a-stopped-program-does-not-end",
        harm="each segment of a program that prints its metrics ends ten seconds late, by SIGKILL",
        file=_GUARD,
        old="            _send(program, signal.SIGCONT)\n",
        new="",
        tests=("tests/unit/test_program_process.py",),
    ),
    Mutant(
        name="a-part-of-a-program-not-stopped",
        harm="a child that a program has started tears the files that are being copied",
        file="executor/training/program.py",
        old="os.killpg(self._pid, number)",
        new="os.kill(self._pid, number)",
        tests=("tests/unit/test_program_process.py",),
    ),
)
