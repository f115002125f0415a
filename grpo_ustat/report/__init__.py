"""The command `report`: tables, figures and a page that combine any set of run folders."""
