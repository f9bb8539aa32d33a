"""The API server, once: a JSON client, list and watch, apply, events and the lease.

Shared by controller and gate. Nothing here knows what a checkpoint is.
"""
