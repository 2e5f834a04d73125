"""The work of a command or a service's process: check, profile, run, pool, backup."""
