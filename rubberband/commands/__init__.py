"""The commands of the command line, one module each; a module imports at its top only what starts fast."""
