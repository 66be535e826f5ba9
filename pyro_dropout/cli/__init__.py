"""The command line: one file for each command, and a fitted run as a folder."""
