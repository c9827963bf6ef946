"""Search among operators' own configurations."""
