"""The controller: one active process that derives what the cluster shows and keeps the hold PDBs.

`handlers` and the watches only enqueue; `reconcile` observes, lets pure modules decide, applies.
"""
