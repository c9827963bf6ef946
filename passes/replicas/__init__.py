"""Where replicas meet, and whether each on its own batch they train what one device trains on all."""
