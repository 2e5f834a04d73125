"""Training of one trial by the workers of its gang, without Ray; a backend calls `run.run_segment` in each of them.

* What users write: `trial` (any framework), `torch_trial`, and functions and programs, which call `reporting`, also in
  gangs (`distributed`); `entrypoint` finds it. `checking`, `comparing` and `program_check` check it
  before anything is rented, in `check_workers`, and add to `check_findings`.
* A segment: `segment` (its order, its reports), `run` (the walk through it), `kinds` (their runners), `runner` (one),
  `worker_process` (what is put back afterwards), `failures`, `checkpoint`.
* The loop of a `TorchTrial`: `loop`, `components` (its parts, and which features there are), `step` (one optimizer
  step), `options` (optimizer, precision), `schedule` (learning rates), `metrics` (means and evaluation), `wrapping`
  (the model in a gang), `gang` (the process group).
* Data: `sampler` (which samples, in what order and shares), `data` (samples to batches), `loading` (processes that load
  ahead), `gpu_rows` (what fits on the GPU).
* Features of the loop: `goodput` (batches), `balancing` (shares by speed), both with `clocks`.
* Programs: `command_runner` (one trial), `program` (its process) and `guard` (which ends it), `printed` (metrics in its
  output), `program_gang` (places in a gang), `function_process` (a function as such a process).
* `lifeline`: by which the workers of any gang learn that one is gone. `asynchronous`: training with parameter servers.
"""
