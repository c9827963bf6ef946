"""The command line: one command a file, and what they share."""
