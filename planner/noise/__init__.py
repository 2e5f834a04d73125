"""Samples of plans where times vary: random times, makespans, losses of spot instances, and runs of asha."""
