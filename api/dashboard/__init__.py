"""The pages for people, rendered here; what they show is what REST tells."""
