"""Commands of the command line. A module imports at its top only what starts fast."""
