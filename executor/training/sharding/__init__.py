"""Models that are divided among the workers of a gang: `sharding = "fsdp"` of a `TorchTrial`."""
