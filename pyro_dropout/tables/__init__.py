"""Reading tables from files, and encoding their columns as numbers."""
