"""Planted bugs of this machine's GPUs: who sees which, who takes which, and what is said about it."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_ENVIRONMENT = ("tests/unit/test_worker_environment.py",)
_LOCAL = ("tests/unit/test_local_gpus.py",)
_RUNS = (
    "tests/integration/test_local_provider.py::test_runs_at_once_take_different_gpus_and_a_killed_one_gives_its_own_back",
)
_FORK_SERVER = ("tests/unit/test_fork_server.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="guards-drop-locks",
        harm="two runs at once train on one GPU, while another idles",
        file="cloud/local/guarding.py",
        old="                    pass_fds=held,\n",
        new="",
        tests=_RUNS,
    ),
    Mutant(
        name="busy-gpus-taken",
        harm="trials start on a GPU whose memory another user fills",
        file="cloud/local/gpus.py",
        old="    left = {gpu: name for gpu, name in gpus.names.items() if gpu not in used}\n",
        new="    left = gpus.names\n",
        tests=_LOCAL,
    ),
    Mutant(
        name="gpus-of-nvidia-smi-alone",
        harm="with a torch for the CPU nothing runs on a machine that has a GPU",
        file="cloud/local/gpus.py",
        old="        named, note = _seen_of(named, seen)\n",
        new="        note = []\n",
        tests=_LOCAL,
    ),
    Mutant(
        name="a-broken-torch-is-remembered",
        harm="trials use the CPU until the next boot, though the driver has been mended",
        file="cloud/local/gpus.py",
        old="    if seen.count == len(named) or not seen.is_built:",
        new="    if True:",
        tests=_LOCAL,
    ),
    Mutant(
        name="a-broken-driver-untold",
        harm="after an update of the driver everything trains on the CPU, and nothing says so",
        file="cloud/local/gpus.py",
        old="    if done.returncode == 0:\n",
        new="    if True:\n",
        tests=_LOCAL,
    ),
    Mutant(
        name="devices-after-minus-one",
        harm="a GPU is counted that CUDA does not show",
        file="cloud/local/gpus.py",
        old="        if len(fitting) != 1:\n            break\n",
        new="        if len(fitting) != 1:\n            continue\n",
        tests=_LOCAL,
    ),
    Mutant(
        name="logical-gpus-show-the-real-one",
        harm="trials that train on the CPU by the plan find a GPU, several at once",
        file="executor/training/environment.py",
        old='        chosen["CUDA_VISIBLE_DEVICES"] = ""\n',
        new="        pass\n",
        tests=_ENVIRONMENT,
    ),
    Mutant(
        name="servers-see-gpus",
        harm="parameter servers put their model on GPU 0, beside a trial",
        file="executor/ray/slot_worker.py",
        old='        os.environ["CUDA_VISIBLE_DEVICES"] = ""  #',
        new="        pass  #",
        tests=_ENVIRONMENT,
    ),
    Mutant(
        name="ray-s-threads-taken-for-the-user-s",
        harm="batches on a GPU are gathered by one thread, as Ray sets OMP_NUM_THREADS to 1",
        file="executor/training/environment.py",
        old="    if _names_threads():\n",
        new='    if "OMP_NUM_THREADS" in os.environ:\n',
        tests=_ENVIRONMENT,
    ),
    Mutant(
        name="forked-beside-cuda",
        harm="workers are forked from a process in which torch has begun with CUDA, and no trial can use its GPU",
        file="executor/ray/fork_server.py",
        old="            refuses = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()\n",
        new="            refuses = torch.cuda.is_initialized()\n",
        tests=_FORK_SERVER,
    ),
    Mutant(
        name="imports-see-hidden-gpus",
        harm="a module that looks for a GPU at its import finds one that its trials do not have",
        file="executor/ray/fork_server.py",
        old="        environment |= worker_settings(environment, device, gpus_on_machine) | _UNTOUCHED\n",
        new="        environment |= _UNTOUCHED\n",
        tests=_FORK_SERVER,
    ),
)
