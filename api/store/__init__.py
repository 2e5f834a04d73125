"""The database of the service: submissions, the feed of events, plans, tokens, sessions, answers already given."""
