"""How values travel between ranks."""
