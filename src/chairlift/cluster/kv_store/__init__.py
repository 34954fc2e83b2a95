"""A KV store that replicas share: evicted blocks go to a Redis or Valkey server, and come back to any replica.

resp.py speaks the few commands that are needed; store.py is the store as one engine sees it. It is a cache behind the
cache: without it, or when it is slower than computing, blocks are computed.
"""
