"""What commands answer with --json: a record each, which is the document's schema (docs/decisions/001)."""
