"""The Ray backend: warm workers on labelled instances, gangs of DDP processes."""
