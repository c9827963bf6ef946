"""What the page shows of decisions: variables, meshes, reasons."""
