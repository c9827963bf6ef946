"""What the stages call: to read the batch, measure rows, price steps, choose, build plans."""
