"""Tables, figures and one page of any set of run folders together: the command `report`."""
