"""The command `report`: write tables, figures and a page on any set of run folders."""
