"""The pages for people. They show what the REST API answers."""
