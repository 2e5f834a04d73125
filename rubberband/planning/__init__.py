"""From an experiment to a planning problem: prices, quotas, candidates, limits, and the changes that help."""
