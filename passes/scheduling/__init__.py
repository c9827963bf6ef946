"""From the distributed step to segments, buffers and instructions."""
