"""Think, purely: predicts what a plan takes and costs, and finds the cheapest one. No I/O, no clock."""
