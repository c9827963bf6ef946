"""The table of gradient rules, op by op."""
