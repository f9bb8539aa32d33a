"""The operator: the cluster API, the controller and the gate."""
