"""The journal of an experiment, its folder, and what others write into it."""
