"""Throughput of asynchronous training, as pure functions of one worker's times (Lin et al., §3 and §7)."""
