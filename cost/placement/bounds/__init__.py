"""Lower bounds of placements, checked in whole numbers."""
