"""A plan: its instructions, its folder, and the proofs that it can be carried out."""
