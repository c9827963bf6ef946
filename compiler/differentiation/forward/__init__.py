"""A forward graph in the one form that is differentiated: decomposed, unrolled, of the batch asked for."""
