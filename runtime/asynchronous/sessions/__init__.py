"""Sessions: who takes part in one, and what they say to each other."""
