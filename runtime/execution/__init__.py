"""One rank carries out its program."""
