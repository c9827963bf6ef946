"""Composed ops, written as ops that have gradient rules."""
