"""Who may ask, for what, how much and how often."""
