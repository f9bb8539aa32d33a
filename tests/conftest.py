# Registered here because pytest takes plugins from the topmost conftest.py only: the fixtures
# `cluster`, `ground` and `namespace` of tests that need a Kubernetes cluster.
pytest_plugins = ["tidegate_ground.fixtures"]
