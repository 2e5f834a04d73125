"""What runs inside a trial: user-facing trial classes, data order, the training loop, checkpoints."""
