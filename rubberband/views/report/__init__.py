"""The report of a result: tables, text and page."""
