"""Pods by run, by policy and by node, kept as the watch tells. No I/O; one event loop."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from tidegate_operator.controller.facts import Pod
from tidegate_operator.kube.kinds import Key

Groups = dict[Key, dict[Key, Pod]]


class PodIndex:
    """The opted-in pods of the cluster."""

    def __init__(self) -> None:
        """Begins empty."""
        self._by_run: Groups = defaultdict(dict)
        self._by_policy: Groups = defaultdict(dict)
        self._by_node: Groups = defaultdict(dict)

    def update(self, old: Pod | None, new: Pod | None) -> None:
        """Follows one change; None stands for absent."""
        for pod in (old,) if old else ():
            for groups, group in self._places(pod):
                groups[group].pop(pod.key, None)
                if not groups[group]:
                    del groups[group]
        for pod in (new,) if new else ():
            for groups, group in self._places(pod):
                groups[group][pod.key] = pod

    def of_run(self, run: Key) -> tuple[Pod, ...]:
        """Pods that carry the run's label, ordered by name."""
        return _ordered(self._by_run, run)

    def of_policy(self, policy: Key) -> tuple[Pod, ...]:
        """Pods that name the policy, ordered by name."""
        return _ordered(self._by_policy, policy)

    def runs_on(self, node: str) -> set[Key]:
        """Runs that have a live injected pod on the node."""
        pods = self._by_node.get(Key("", node), {}).values()
        return {pod.run for pod in pods if pod.run and pod.is_live and pod.is_injected}

    def runs_in(self, namespace: str) -> set[Key]:
        """Runs of a namespace that have pods."""
        return {run for run in self._by_run if run.namespace == namespace}

    def runs(self) -> Iterable[Key]:
        """All runs that have pods."""
        return tuple(self._by_run)

    def _places(self, pod: Pod) -> Iterator[tuple[Groups, Key]]:
        if pod.run:
            yield self._by_run, pod.run
        if pod.node:
            yield self._by_node, Key("", pod.node)
        yield self._by_policy, pod.policy


def _ordered(groups: Groups, group: Key) -> tuple[Pod, ...]:
    pods = groups.get(group, {})
    return tuple(pods[key] for key in sorted(pods))
