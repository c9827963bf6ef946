"""A training graph, what is known of its tensors, and passes that keep its meaning."""
