"""What is known of a training graph before anything is decided."""
