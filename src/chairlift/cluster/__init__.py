"""Beyond one device and one process: a model divided over ranks (tensor_parallel/).

Everything here stands behind the engine's seams: an executor that runs several ranks is an executor like any other.
"""
