"""Data that come along, and data that can be fetched."""
