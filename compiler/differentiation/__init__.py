"""From a forward graph to a training graph: loss, gradients, updates."""
