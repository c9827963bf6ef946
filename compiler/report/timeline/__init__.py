"""What the page shows of a step's predicted timeline."""
