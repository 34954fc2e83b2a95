"""Traffic: the requests of a benchmark or a simulation, drawn from a seed or read from a recording.

Every request is a `Query`, in a workload, a mix or a trace. Nothing here imports an engine, a server or a model.
"""
