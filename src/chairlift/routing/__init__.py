"""Routing: which replica of a model gets a request.

Pure Python without I/O, clock or torch, as core is: the server, the router in front of servers and simulations run the
same code. A replica is a name; callers send the requests and report how they end.
"""
