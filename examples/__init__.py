"""Clusters, batch scripts and programs to begin with: `partc examples` lists them."""
