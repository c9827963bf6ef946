"""Bodies that a segment gets for a CPU: tiles, blocks, transposed products."""
