"""What users write: the experiment file, its search space, its limits and its resources, and how a file is read."""
