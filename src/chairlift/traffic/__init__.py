"""Traffic: the requests of a benchmark or a simulation, as records that are drawn from a seed or read from a recording.

A request is one `Query`, whoever sends it. Nothing here knows an engine, a server or a model.
"""
