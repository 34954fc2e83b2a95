"""The operations of a decoder, one file each: a plain torch reference and its fast versions behind one call.

Nothing here depends on requests or the scheduler: ops take tensors, block tables and row ranges. Every fast version has
a parity test against its reference.
"""
