"""Many networks trained as one computation."""
