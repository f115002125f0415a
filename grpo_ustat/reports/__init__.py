"""What any set of run folders found, together: tables, figures and their data, a page."""
