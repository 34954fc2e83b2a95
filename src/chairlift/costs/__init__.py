"""What things cost: a machine's rates, a model's steps and those of the host, and the least that physics allows.

It measures models, operations and the core, and knows no executor: the one who builds an engine asks here.
"""
