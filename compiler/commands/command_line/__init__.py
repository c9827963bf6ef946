"""How commands are declared: options that all have, help in groups, completion, and their reference."""
