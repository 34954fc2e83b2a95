"""Replicas on a Ray cluster: actors that each run a server process, behind the gateway.

Ray places the actors and notices their end; requests do not pass through it. Everything here but connect.py needs
`pip install 'chairlift[ray]'`.
"""
