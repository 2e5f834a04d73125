"""Training of one trial by the workers of its gang, without Ray; a backend calls `run.run_segment` in each of them.

* What users write: `trial` (any framework), `torch_trial`, and functions and programs, which call `reporting`, also in
  gangs (`distributed`); `entrypoint` finds it. `checking` and `comparing` check it before anything is
  rented, in `check_workers`, and add to `check_findings`.
* A segment: `segment` (its order, its reports), `run` (the walk through it), `kinds` (their runners), `runner` (one),
  `worker_process` (what is put back afterwards), `failures`, `checkpoint`.
* The loop of a `TorchTrial`: `loop`, `components` (its parts), `step` (one optimizer
  step), `options` (optimizer, precision), `schedule` (learning rates), `metrics` (means and evaluation), `wrapping`
  (the model in a gang), `gang` (the process group).
* Data: `sampler` (which samples, in what order and shares), `data` (samples to batches), `loading` (processes that load
  ahead), `gpu_rows` (what fits on the GPU).
* Features of the loop: `goodput` (batches), `balancing` (shares by speed), both with `clocks`.
* `programs`: `runner` (one trial), `process` and `guard` (which ends it), `printed` (metrics in its output), `gang`
  (places in a gang), `functions` (a function as such a process), `check`.
* `lifeline`: by which the workers of any gang learn that one is gone. `asynchronous`: training with parameter servers.
"""
