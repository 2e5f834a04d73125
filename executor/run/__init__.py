"""One run: its driver, its session, who follows it, and what it may spend."""
