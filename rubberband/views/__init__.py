"""Views for people: the live view of a run, and reports and estimates as text and pages. Views change nothing."""
