"""Where values come from and where they are kept: data, initial values, checkpoints."""
