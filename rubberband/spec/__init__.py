"""The words of users: the experiment file, its search space, its limits and its resources, and the reading of files."""
