"""The pages for people, rendered here. They show what the REST API answers."""
