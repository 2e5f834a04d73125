"""The head and the nodes of a Ray cluster, on this machine or on EC2."""
