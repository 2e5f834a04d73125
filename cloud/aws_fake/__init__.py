"""EC2 without Amazon: its behaviour (faults and the bill included) for tests and rehearsals; it rents nothing."""
