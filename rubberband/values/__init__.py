"""The values that all parts share: stages, plans, profiles, offers and distributions. They compute nothing."""
