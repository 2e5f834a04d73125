"""A program as a trial: its process, what it prints, its gangs and its check. Functions in processes of their own."""
