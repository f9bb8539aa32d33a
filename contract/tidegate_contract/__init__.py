"""What separately started processes of Tidegate must agree on: names, documents, reading, writing.

Imports the standard library and xxhash only. The trainer, the sidecar, the operator and the
command line import this package and never each other.
"""

__version__ = "0.1.0"
