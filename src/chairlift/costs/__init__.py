"""What things cost: a machine's rates, a model's steps and those of the host, and the least that physics allows.

It measures models, operations and the core and imports no executor: execution/ uses it to build an engine.
"""
