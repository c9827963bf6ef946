"""report.html: what the plan says, told to a person."""
