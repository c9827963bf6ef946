"""What is a parameter and what is a constant: from the exporter's metadata, the values, and the structure."""
