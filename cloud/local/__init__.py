"""This machine as an elastic cluster: an instance is a real Ray node with logical GPUs."""
