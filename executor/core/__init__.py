"""The controller and its state: what an event changes and which commands follow. No clock, no network, no Ray."""
