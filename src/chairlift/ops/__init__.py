"""The operations of a decoder, one file each: a plain torch reference (the truth) and fast versions behind one call.

Nothing here knows of requests or schedules: ops see tensors, block tables and row ranges. Every fast version has a
parity test against its reference.
"""
