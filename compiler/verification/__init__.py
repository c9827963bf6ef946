"""N ranks against one device on the same total batch."""
