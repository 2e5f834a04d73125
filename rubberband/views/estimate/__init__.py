"""An estimate: tables and page, the size of a search, and prices."""
