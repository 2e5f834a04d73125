"""Charts, as plain Plotly figures; pure."""
