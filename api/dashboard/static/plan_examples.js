// Experiments to begin with.
export const EXAMPLES = {
  digits: `# Successive halving over a small convolutional network on scikit-learn's digits, on this machine.
version: 1
name: digits
entrypoint: examples.digits:DigitsTrial
search:
  space:
    lr: {type: loguniform, lower: 1e-3, upper: 0.3}
    momentum: {type: uniform, lower: 0.5, upper: 0.95}
    weight_decay: {type: loguniform, lower: 1e-6, upper: 1e-3}
    width: {type: choice, values: [8, 12, 16]}
  scheduler: {type: sha, num_samples: 16, grace_period: 1, max_t: 7, reduction_factor: 2}
  sampler: {type: random, seed: 7}
  metric: accuracy
  mode: max
constraints:
  deadline: 5m
  max_cost: 1
resources:
  provider: local
  gpus_per_instance: 1
  price_per_hour: 3.06  # USD, at which the run is metered; nothing is charged
  max_instances: 4
  gpus_per_trial: {min: 1, max: 1}
  provision_delay: 1s
  init_delay: 10s
profile:  # measure your own with: rubberband profile FILE
  seconds_per_iteration: {1: 1.5}
  trial_startup: 2s
`,
  scaling: `# Sixteen trials on instances with four GPUs each: the cluster is wide first, then it shrinks.
version: 1
name: scaling
entrypoint: examples.scaling:ScalingTrial
search:
  space:
    floor: {type: uniform, lower: 0.0, upper: 0.5}
    decay: {type: uniform, lower: 0.3, upper: 1.0}
  scheduler: {type: sha, num_samples: 16, grace_period: 1, max_t: 31, reduction_factor: 2}
  sampler: {type: random, seed: 7}
  metric: loss
  mode: min
constraints:
  deadline: 80s
  max_cost: 5
resources:
  provider: local
  gpus_per_instance: 4  # logical ones
  price_per_hour: 12.24  # USD, at which the run is metered; nothing is charged
  max_instances: 6
  gpus_per_trial: {min: 1, max: 8}
  minimum_billed: 0s
  provision_delay: 1s
  init_delay: 15s
profile:
  seconds_per_iteration: {1: 6.0, 2: 3.1, 4: 1.65, 8: 0.9}
  trial_startup: 0.1s
`,
};
