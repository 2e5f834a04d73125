"""The inside of a trial: user-facing trial classes, data order, the training loop, checkpoints."""
