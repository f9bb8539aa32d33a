"""The test ground: a real Kubernetes of several nodes on one Linux machine.

The control plane has a network namespace of its own; each node is a set of namespaces with its
own disks, in which containerd, kube-proxy and kubelet run below a small pid 1. There is no
container engine and no virtual machine, and nothing of Tidegate is in it.

Start with `ground.Ground` (one such cluster), `cluster.Cluster` (any cluster that a kubeconfig
reaches) and `fixtures` (what tests ask for). `python -m tidegate_ground` is the command line.
The modules a node's pid 1 loads use the standard library alone, and so does everything they need.
"""
