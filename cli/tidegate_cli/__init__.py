"""The `tidegate` command: thin, over the contract and the sidecar."""
