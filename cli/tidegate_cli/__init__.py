"""The `tidegate` command: thin, over the contract."""
