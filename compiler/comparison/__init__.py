"""What makes one step longer than another: a plan and another, a plan and its run, a plan on other machines."""
