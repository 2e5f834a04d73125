"""Tools for agents by the Model Context Protocol (`rubberband mcp`), within a cap that a person sets."""
