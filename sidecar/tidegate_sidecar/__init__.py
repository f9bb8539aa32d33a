"""Takes sealed steps from the node to the remote tier: in a pod, for a node, or by hand.

Imports the contract, prometheus-client and the standard library; never torch, kopf or a Kubernetes
client.
"""
