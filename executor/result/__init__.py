"""The result of an experiment, from its journal alone."""
