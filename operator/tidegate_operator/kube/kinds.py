"""The kinds that Tidegate reads or writes, and the paths of their objects. Pure.

The one place that spells API groups, versions and plurals.
"""

from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from tidegate_contract import keys


class Key(NamedTuple):
    """Names one object of a kind; the namespace is empty for kinds without."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the API server names one kind.

    Attributes:
        group: empty for the core group.
        version: as in `v1`.
        kind: singular CamelCase name.
        plural: name within paths.
        is_namespaced: whether its objects live in namespaces.
    """

    group: str
    version: str
    kind: str
    plural: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The text of `apiVersion` in its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of an object, or of a list.

        Args:
            namespace: empty for a list over all namespaces, and for kinds without namespaces.
            name: empty for a list or a create.
            subresource: as in `status`; needs a name.
        """
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = ["namespaces", namespace, self.plural] if namespace else [self.plural]
        parts += [part for part in (name, subresource) if part]
        return "/".join((root, *(quote(part, safe="") for part in parts)))


POLICIES = Kind(
    group=keys.GROUP, version=keys.VERSION, kind="CheckpointPolicy", plural="checkpointpolicies"
)
RUNS = Kind(group=keys.GROUP, version=keys.VERSION, kind="CheckpointRun", plural="checkpointruns")
PODS = Kind(group="", version="v1", kind="Pod", plural="pods")
NODES = Kind(group="", version="v1", kind="Node", plural="nodes", is_namespaced=False)
NAMESPACES = Kind(
    group="", version="v1", kind="Namespace", plural="namespaces", is_namespaced=False
)
SECRETS = Kind(group="", version="v1", kind="Secret", plural="secrets")
SERVICES = Kind(group="", version="v1", kind="Service", plural="services")
CLAIMS = Kind(group="", version="v1", kind="PersistentVolumeClaim", plural="persistentvolumeclaims")
PDBS = Kind(group="policy", version="v1", kind="PodDisruptionBudget", plural="poddisruptionbudgets")
LEASES = Kind(group="coordination.k8s.io", version="v1", kind="Lease", plural="leases")
EVENTS = Kind(group="events.k8s.io", version="v1", kind="Event", plural="events")
CLUSTER_ROLES = Kind(
    group="rbac.authorization.k8s.io",
    version="v1",
    kind="ClusterRole",
    plural="clusterroles",
    is_namespaced=False,
)
MUTATING_WEBHOOKS = Kind(
    group="admissionregistration.k8s.io",
    version="v1",
    kind="MutatingWebhookConfiguration",
    plural="mutatingwebhookconfigurations",
    is_namespaced=False,
)
VALIDATING_WEBHOOKS = Kind(
    group="admissionregistration.k8s.io",
    version="v1",
    kind="ValidatingWebhookConfiguration",
    plural="validatingwebhookconfigurations",
    is_namespaced=False,
)
TOKEN_REVIEWS = Kind(
    group="authentication.k8s.io",
    version="v1",
    kind="TokenReview",
    plural="tokenreviews",
    is_namespaced=False,
)
