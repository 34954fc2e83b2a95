"""Beyond one device and one process: a model divided over ranks (tensor_parallel/), KV blocks that move between engines
(kv_transfer/) and that engines share in a store (kv_store/); servers on a Ray cluster (ray/).

Everything here stands behind the engine's seams: an executor that runs several ranks is an executor like any other, and
blocks from elsewhere are cached blocks like any other.
"""
