"""The plan and the executors that carry it out. Imports nothing else of partc."""
