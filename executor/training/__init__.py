"""Training of one trial by the workers of its gang, without Ray; a backend calls `run.run_segment` in each of them.

* What users write: `trial` (any framework, functions) and `torch_trial`; `entrypoint` finds it, `checking`, `comparing`
  and `remembering` check it before anything is rented.
* A segment: `segment` (its order, its reports), `run` (the walk through it), `runner` (one trial, by its kind),
  `worker_process` (what is put back afterwards), `failures`, `checkpoint`.
* The loop of a `TorchTrial`: `loop`, `step` (one optimizer step), `options` (optimizer, schedules, precision),
  `metrics` (means and evaluation), `wrapping` (the model in a gang), `gang` (the process group).
* Data: `sampler` (which samples, in what order and shares), `data` (samples to batches), `loading` (processes that load
  ahead), `gpu_rows` (what fits on the GPU).
* Batches by goodput: `adaptation`, `agent`, `gradient_noise`, `noise_scale`. Shares by speed: `balancing`, `clocks`.
* `asynchronous`: training with parameter servers.
"""
