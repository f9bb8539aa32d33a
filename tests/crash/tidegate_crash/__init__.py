"""Crash enumeration: the format's own code on a simulated disk, killed and cut at every call."""
