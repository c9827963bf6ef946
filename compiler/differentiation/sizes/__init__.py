"""What a forward graph's sizes are, as far as constants and shapes tell."""
