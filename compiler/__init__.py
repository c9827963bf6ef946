"""From files to files: command line, importers, training-graph builder, emission, report."""
