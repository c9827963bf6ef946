"""What commands are given: their options as annotated types, and the values that their texts stand for."""
