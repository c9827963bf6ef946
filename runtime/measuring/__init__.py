"""Measure what moving bytes takes between the devices of a cluster."""
