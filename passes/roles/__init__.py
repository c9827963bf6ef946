"""What nodes, variables and gradients of a step are for, before anything is decided."""
