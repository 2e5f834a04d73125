"""What people look at: the live view of a run, its report as text and as a page. Views read; they change nothing."""
