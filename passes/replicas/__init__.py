"""Whether replicas, each on a batch of its own, train what one device trains on all their batches."""
