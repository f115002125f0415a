"""What `report` does: tables, figures and one page of any set of run folders together."""
