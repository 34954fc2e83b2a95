"""Execution with torch: what a plan of slices becomes on a device.

The executor keeps one row of device state for each seat in the batch, turns a plan into one flat forward pass, and
samples on the device. It never decides what to run: that is core's.
"""
