"""The gate: admission of pods and evictions, reports of the lead sidecars, the hold's clocks.

Several replicas run side by side and agree through the cluster's API alone. Called by
`python -m tidegate_operator gate`.
"""
