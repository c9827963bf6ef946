"""Find what a strategy leaves open."""
