"""What the service remembers: submissions, the feed of events, plans, tokens, sessions, answers already given."""
