"""The journal of an experiment, its folder, and its inbox."""
