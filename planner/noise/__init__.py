"""Planning where times vary: samples, odds, and the plan that keeps its limits with the confidence asked for."""
