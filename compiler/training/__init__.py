"""From a forward graph to a training graph: differentiation, losses, optimizers."""
