"""Execution with torch: a planned step as one forward pass on a device.

The executor keeps one row of device state per sequence in the batch, lays a step's slices out as one flat batch, and
samples on the device. It never decides what to run: core does.
"""
