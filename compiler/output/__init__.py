"""What a compilation leaves behind: the plan's folder, and the user's graph written back."""
