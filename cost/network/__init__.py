"""What moving bytes through a cluster takes."""
