"""Jobs: processes started on a cluster's hosts, watched, and what they bring back."""
