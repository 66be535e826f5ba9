"""Tables from files: what is in them, and how columns become numbers."""
