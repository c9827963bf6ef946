"""All that routes by id: indexed slices, and tables that are read by index."""
