"""What makes one step longer than another: of two plans, of a plan and its run, on other machines."""
